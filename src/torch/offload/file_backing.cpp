// SPDX-License-Identifier: Apache-2.0

#include "torch/offload/file_backing.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

namespace backfold::torch_layer {
namespace {

std::string folder() {
  std::error_code missing;
  const std::filesystem::path path = std::filesystem::temp_directory_path(missing);
  return missing ? "/tmp" : path.string();
}

[[noreturn]] void refuse(const char* what, std::size_t bytes, int error) {
  TORCH_CHECK(false, what, " of ", bytes, " bytes in ", folder(), ": ", std::strerror(error));
}

class MappedSlab : public Slab {
 public:
  explicit MappedSlab(std::size_t bytes) : Slab(map(bytes), bytes) {}
  ~MappedSlab() override { munmap(data(), bytes()); }

 private:
  static void* map(std::size_t bytes) {
    // Growing a file past its limit would be a signal.
    rlimit limit{};
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < bytes)
      refuse("a file", bytes, EFBIG);
    std::string path = folder() + "/backfold-XXXXXX";
    const int file = mkostemp(path.data(), O_CLOEXEC);
    if (file < 0) refuse("a file", bytes, errno);
    unlink(path.c_str());
    int error = posix_fallocate(file, 0, static_cast<off_t>(bytes));
    void* memory = MAP_FAILED;
    if (error == 0) {
      memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
      if (memory == MAP_FAILED) error = errno;
    }
    close(file);  // the mapping keeps what it needs
    if (error != 0) refuse("a file", bytes, error);
    // A forked process would share it, and write over what its parent keeps there.
    madvise(memory, bytes, MADV_DONTFORK);
    return memory;
  }
};

class FileTransfer : public Transfer {
 public:
  FileTransfer(Worker& worker, std::function<void()> copy)
      : worker_(worker), job_(worker.add(std::move(copy))) {}

  bool has_ended() override { return worker_.has_ended(*job_); }
  void wait() override { worker_.wait(*job_); }
  void deliver() override { wait(); }
  std::string failure() override { return worker_.failure(*job_); }

 private:
  Worker& worker_;
  const std::shared_ptr<Worker::Job> job_;
};

}  // namespace

FileBacking::FileBacking(std::size_t most_bytes)
    : Backing([](std::size_t bytes) { return std::make_unique<MappedSlab>(bytes); }, most_bytes) {}

std::shared_ptr<Transfer> FileBacking::write(const at::Tensor& from,
                                             const std::optional<c10::Stream>&, const Room& to) {
  const auto* bytes = static_cast<const char*>(from.const_data_ptr());
  return std::make_shared<FileTransfer>(worker_, [bytes, left = from.nbytes(), to]() mutable {
    for (const Extent& extent : to) {
      const std::size_t count = std::min(left, extent.bytes);
      std::memcpy(extent.data(), bytes, count);
      // Not lost: the pages are the file's.
      madvise(extent.data(), extent.bytes, MADV_DONTNEED);
      bytes += count;
      left -= count;
    }
  });
}

std::shared_ptr<Transfer> FileBacking::read(const Room& from, const at::Tensor& into) {
  auto* bytes = static_cast<char*>(into.mutable_data_ptr());
  return std::make_shared<FileTransfer>(worker_, [bytes, left = into.nbytes(), from]() mutable {
    for (const Extent& extent : from) {
      const std::size_t count = std::min(left, extent.bytes);
      std::memcpy(bytes, extent.data(), count);
      madvise(extent.data(), extent.bytes, MADV_DONTNEED);
      bytes += count;
      left -= count;
    }
  });
}

std::string FileBacking::name() const { return "a file in " + folder(); }

}  // namespace backfold::torch_layer
