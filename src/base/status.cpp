// SPDX-License-Identifier: Apache-2.0

#include "backfold/status.h"

#include <cstdarg>
#include <cstdio>

namespace backfold {

Status Status::error(StatusCode code, const char* format, ...) {
  Status status;
  status.code_ = code;
  std::va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(status.message_, sizeof(status.message_), format, arguments);
  va_end(arguments);
  return status;
}

}  // namespace backfold
