// SPDX-License-Identifier: Apache-2.0

#include "core/support.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>

#ifdef BACKFOLD_TEST_CUDA
#include <cuda_runtime_api.h>
#endif
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#endif

namespace backfold::testing {
namespace {

constexpr std::align_val_t kAlignment{64};

#ifdef BACKFOLD_TEST_CUDA
void expect_success(cudaError_t error) {
  EXPECT_EQ(error, cudaSuccess) << cudaGetErrorString(error);
}

bool has_device() {
  int devices = 0;
  return cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
}

// A stream that the default one does not wait for: work enqueued elsewhere shows.
void* device_stream() {
  static const cudaStream_t stream = [] {
    cudaStream_t made = nullptr;
    expect_success(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking));
    return made;
  }();
  return stream;
}
#endif

std::byte* allocate(Backend backend, std::size_t bytes) {
#ifdef BACKFOLD_TEST_CUDA
  if (backend == Backend::kCuda) {
    void* memory = nullptr;
    expect_success(cudaMalloc(&memory, bytes));
    return static_cast<std::byte*>(memory);
  }
#endif
  (void)backend;
  return static_cast<std::byte*>(::operator new(bytes, kAlignment));
}

void release(Backend backend, std::byte* memory) {
#ifdef BACKFOLD_TEST_CUDA
  if (backend == Backend::kCuda) return expect_success(cudaFree(memory));
#endif
  (void)backend;
  ::operator delete(memory, kAlignment);
}

void copy_in(Backend backend, std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes == 0) return;
#ifdef BACKFOLD_TEST_CUDA
  if (backend == Backend::kCuda) {
    expect_success(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice));
    return expect_success(cudaDeviceSynchronize());
  }
#endif
  (void)backend;
  std::memcpy(to, from, bytes);
}

void copy_out(Backend backend, std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes == 0) return;
#ifdef BACKFOLD_TEST_CUDA
  if (backend == Backend::kCuda) {
    expect_success(cudaDeviceSynchronize());
    return expect_success(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost));
  }
#endif
  (void)backend;
  std::memcpy(to, from, bytes);
}

}  // namespace

const std::vector<Place>& places() {
  static const std::vector<Place> all = [] {
    std::vector<Place> list = {reference()};
    list.push_back({"reference, 3 threads", {.backend = Backend::kReference, .threads = 3}});
    for (const int threads : {1, 2, 3})
      list.push_back({"cpu, " + std::to_string(threads) + " threads",
                      {.backend = Backend::kCpu, .threads = threads}});
    for (const std::string_view target : simd_targets())
      list.push_back({std::string(target), {.backend = Backend::kSimd, .simd_target = target}});
#ifdef BACKFOLD_TEST_CUDA
    if (built_with_cuda() && has_device())
      list.push_back({"cuda", {.backend = Backend::kCuda, .stream = device_stream()}});
#endif
    return list;
  }();
  return all;
}

const Place& reference() {
  static const Place place = {"reference", {.backend = Backend::kReference}};
  return place;
}

std::string_view expected_runner(const Execution& execution, bool has_simd_kernels) {
  if (execution.backend == Backend::kCuda) return "cuda";
  if (execution.backend == Backend::kReference || !has_simd_kernels) return "reference";
  if (execution.backend == Backend::kSimd && !execution.simd_target.empty())
    return execution.simd_target;
  const char* forced = std::getenv("BACKFOLD_TARGET");
  if (execution.backend == Backend::kCpu && forced != nullptr) return forced;
  return simd_targets().empty() ? "reference" : simd_targets().front();
}

Memory::Memory(Backend backend, std::size_t bytes, std::size_t offset)
    : backend_(backend), bytes_(bytes), offset_(offset) {
  static std::atomic<unsigned> made = 0;
  fill_ = static_cast<std::byte>(0xa5u + 37u * made++);
  const std::size_t all = kGuard + offset + bytes + kGuard;
  allocation_ = allocate(backend, all);
  data_ = allocation_ + kGuard + offset;
  copy_in(backend, allocation_, Bytes(all, fill_).data(), all);
  if (backend != Backend::kCuda) {
    ASAN_POISON_MEMORY_REGION(allocation_, kGuard + offset);
    ASAN_POISON_MEMORY_REGION(data_ + bytes, kGuard);
  }
}

Memory::~Memory() {
  if (backend_ != Backend::kCuda)
    ASAN_UNPOISON_MEMORY_REGION(allocation_, kGuard + offset_ + bytes_ + kGuard);
  release(backend_, allocation_);
}

void Memory::write(std::span<const std::byte> content) {
  ASSERT_LE(content.size(), bytes_);
  copy_in(backend_, data_, content.data(), content.size());
}

Bytes Memory::read() const {
  Bytes content(bytes_);
  copy_out(backend_, content.data(), data_, bytes_);
  return content;
}

Bytes Memory::read_all() const {
  Bytes content(kGuard + offset_ + bytes_ + kGuard);
  const bool host = backend_ != Backend::kCuda;
  if (host) ASAN_UNPOISON_MEMORY_REGION(allocation_, content.size());
  copy_out(backend_, content.data(), allocation_, content.size());
  if (host) {
    ASAN_POISON_MEMORY_REGION(allocation_, kGuard + offset_);
    ASAN_POISON_MEMORY_REGION(data_ + bytes_, kGuard);
  }
  return content;
}

bool Memory::guards_intact() const {
  const Bytes all = read_all();
  const auto untouched = [this](std::byte byte) { return byte == fill_; };
  const auto end_of_front = all.begin() + static_cast<std::ptrdiff_t>(kGuard + offset_);
  return std::all_of(all.begin(), end_of_front, untouched) &&
         std::all_of(end_of_front + static_cast<std::ptrdiff_t>(bytes_), all.end(), untouched);
}

void expect_error(const Status& status, StatusCode code, std::string_view words) {
  EXPECT_EQ(status.code(), code) << status.message();
  EXPECT_NE(status.message().find(words), std::string_view::npos)
      << "'" << status.message() << "' does not say '" << words << "'";
}

std::uint64_t Random::next() {
  std::uint64_t mixed = state_ += 0x9e37'79b9'7f4a'7c15u;
  mixed = (mixed ^ mixed >> 30) * 0xbf58'476d'1ce4'e5b9u;
  mixed = (mixed ^ mixed >> 27) * 0x94d0'49bb'1331'11ebu;
  return mixed ^ mixed >> 31;
}

Bytes noise(std::size_t bytes, std::uint64_t seed) {
  Random random(seed);
  Bytes content(bytes);
  for (std::byte& byte : content) byte = static_cast<std::byte>(random.next());
  return content;
}

const std::vector<std::int64_t>& large_awkward_sizes() {
  static const std::vector<std::int64_t> sizes = {4'095, 8'191, 8'193, 65'537, 131'200, 1'000'003};
  return sizes;
}

}  // namespace backfold::testing
