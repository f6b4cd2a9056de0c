// SPDX-License-Identifier: Apache-2.0
//
// Status: how the core reports an error.
//
// The core prints nothing and throws nothing but std::bad_alloc: errors are returned. A call that
// is refused has written nothing, and its status names the argument, the value it had and what is
// allowed. One that the CUDA runtime broke off (kDevice) may have written part of its result. A
// status owns its message and allocates nothing.

#ifndef BACKFOLD_STATUS_H_
#define BACKFOLD_STATUS_H_

#include <string_view>

namespace backfold {

enum class StatusCode {
  kOk,
  kInvalidArgument,  // an argument is outside what is allowed
  kShortPayload,     // the payload holds fewer bytes than the format needs
  kContractBroken,   // the data break what the caller promised about them
  kUnavailable,      // the backend asked for is not in this build or on this machine
  kDevice,           // the CUDA runtime refused a call
};

class [[nodiscard]] Status {
 public:
  Status() = default;  // success

  // Formats like printf; text past the capacity is cut.
  [[gnu::format(printf, 2, 3)]] static Status error(StatusCode code, const char* format, ...);

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  std::string_view message() const { return message_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  char message_[248] = {};
};

}  // namespace backfold

#endif  // BACKFOLD_STATUS_H_
