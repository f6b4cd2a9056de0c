// SPDX-License-Identifier: Apache-2.0
//
// Tensors of more than 2^31 elements: a 32-bit index anywhere would wrap, read or write the wrong
// end, and make the payloads differ. Needs a GPU and, on the host, about 20 GiB and several
// threads, so these tests run only where there is a GPU.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>

#include "backfold/group.h"
#include "backfold/predicate.h"
#include "backfold/signs.h"
#include "core/support.h"

namespace backfold::testing {
namespace {

constexpr std::int64_t kCount = (std::int64_t{1} << 31) + 1'000'037 * 3;

struct FreeHost {
  void operator()(void* data) const { std::free(data); }
};
struct FreeDevice {
  void operator()(void* data) const { cudaFree(data); }
};
using Host = std::unique_ptr<void, FreeHost>;
using Device = std::unique_ptr<void, FreeDevice>;

Host host_memory(std::size_t bytes) { return Host(std::aligned_alloc(64, (bytes + 63) / 64 * 64)); }

Device device_memory(std::size_t bytes) {
  void* data = nullptr;
  EXPECT_EQ(cudaMalloc(&data, bytes), cudaSuccess);
  return Device(data);
}

// bf16 numbers of both signs and many exponents, different in every group.
Host large_source() {
  Host source = host_memory(kCount * 2);
  auto* elements = static_cast<std::uint16_t*>(source.get());
  std::uint32_t state = 1;
  for (std::int64_t i = 0; i < kCount; ++i) {
    state = state * 1'664'525u + 1'013'904'223u;
    elements[i] = static_cast<std::uint16_t>((state >> 16 & 0x87ffu) | 0x3c00u);
  }
  return source;
}

class Large : public ::testing::Test {
 protected:
  void SetUp() override {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0)
      GTEST_SKIP() << "no GPU on this machine";
  }

  // Packs and unpacks on the device and on the host's SIMD backend; both must agree.
  template <typename Format, typename Pack>
  void expect_agreement(const Format& format, const Pack& pack_call) {
    const Host source = large_source();
    const std::size_t source_bytes = kCount * 2, bytes = packed_bytes(format);
    ASSERT_GT(bytes, 0u);
    Execution host, device;
    host.threads = static_cast<int>(std::thread::hardware_concurrency());
    device.backend = Backend::kCuda;

    const Device on_device = device_memory(source_bytes), packed = device_memory(bytes);
    ASSERT_EQ(cudaMemcpy(on_device.get(), source.get(), source_bytes, cudaMemcpyHostToDevice),
              cudaSuccess);
    Status status = pack_call(format, on_device.get(), Payload{packed.get(), bytes}, device);
    ASSERT_TRUE(status.ok()) << status.message();
    const Host expected = host_memory(bytes), copied = host_memory(bytes);
    status = pack_call(format, source.get(), Payload{expected.get(), bytes}, host);
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_EQ(cudaMemcpy(copied.get(), packed.get(), bytes, cudaMemcpyDeviceToHost), cudaSuccess);
    EXPECT_EQ(std::memcmp(expected.get(), copied.get(), bytes), 0) << "payloads differ";

    status = unpack(format, ConstPayload{packed.get(), bytes}, on_device.get(), device);
    ASSERT_TRUE(status.ok()) << status.message();
    const Host result = host_memory(source_bytes);
    ASSERT_EQ(cudaMemcpy(result.get(), on_device.get(), source_bytes, cudaMemcpyDeviceToHost),
              cudaSuccess);
    status = unpack(format, ConstPayload{expected.get(), bytes}, source.get(), host);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(std::memcmp(source.get(), result.get(), source_bytes), 0) << "results differ";
  }
};

const auto kPackGroup = [](const GroupFormat& format, const void* source, Payload payload,
                           const Execution& execution) {
  return pack(format, source, Key{3, 4}, payload, execution);
};
const auto kPackBits = [](const auto& format, const void* source, Payload payload,
                          const Execution& execution) {
  return pack(format, source, payload, execution);
};

TEST_F(Large, FlatGroups) {
  GroupFormat format{.type = ElementType::kBF16, .bits = 4, .count = kCount};
  expect_agreement(format, kPackGroup);
}

TEST_F(Large, StridedGroups) {
  GroupFormat format{.type = ElementType::kBF16, .bits = 2, .layout = Layout::kStrided};
  format.columns = 1'001;
  format.count = kCount / 1'001 * 1'001;
  expect_agreement(format, kPackGroup);
}

TEST_F(Large, RotatedGroups) {
  GroupFormat format{
      .type = ElementType::kBF16, .bits = 3, .layout = Layout::kRotated, .count = kCount};
  expect_agreement(format, kPackGroup);
}

TEST_F(Large, Predicates) {
  PredicateFormat format;
  format.type = ElementType::kBF16;
  format.count = kCount;
  format.comparison = Comparison::kGreater;
  expect_agreement(format, kPackBits);
}

TEST_F(Large, Signs) {
  const Host expected = host_memory(kCount * 2), copied = host_memory(kCount * 2);
  const Device written = device_memory(kCount * 2);
  const auto fill = [](void* destination, const Execution& execution) {
    const Status status =
        fill_signs(ElementType::kBF16, 1.0f, kCount, Key{3, 4}, destination, execution);
    EXPECT_TRUE(status.ok()) << status.message();
  };
  fill(expected.get(), {.threads = static_cast<int>(std::thread::hardware_concurrency())});
  fill(written.get(), {.backend = Backend::kCuda});
  ASSERT_EQ(cudaMemcpy(copied.get(), written.get(), kCount * 2, cudaMemcpyDeviceToHost),
            cudaSuccess);
  EXPECT_EQ(std::memcmp(expected.get(), copied.get(), kCount * 2), 0) << "signs differ";
}

}  // namespace
}  // namespace backfold::testing
