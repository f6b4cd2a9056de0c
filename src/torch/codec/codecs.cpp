// SPDX-License-Identifier: Apache-2.0

#include "backfold/codecs.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <initializer_list>

namespace backfold {
namespace {

template <typename... Cases>
struct Overloaded : Cases... {
  using Cases::operator()...;
};

void check_one_of(const char* codec, const char* argument, int value,
                  std::initializer_list<int> allowed) {
  std::string list;
  for (const int one : allowed) list += (list.empty() ? "" : ", ") + std::to_string(one);
  TORCH_CHECK_VALUE(std::find(allowed.begin(), allowed.end(), value) != allowed.end(), codec, ": ",
                    argument, " must be one of ", list, ", got ", value);
}

void check_block(const char* codec, int block) {
  TORCH_CHECK_VALUE(block >= 2 && block <= 16, codec, ": block must be from 2 to 16, got ", block);
}

bool is_aten(const std::string& name) {
  for (const c10::OperatorName& known : c10::Dispatcher::singleton().getAllOpNames())
    if (known.name == "aten::" + name) return true;
  return false;
}

}  // namespace

std::string describe(const Codec& codec) {
  const auto number = [](const auto& value) {
    std::string text = std::to_string(value);
    if (text.find('.') == std::string::npos) return text;
    while (text.ends_with('0')) text.pop_back();
    return text.ends_with('.') ? text + '0' : text;
  };
  return std::visit(
      Overloaded{
          [&](const codecs::Quantize& one) {
            return "Quantize(bits=" + number(one.bits) +
                   (one.per_sample ? ", per_sample=True)" : ")");
          },
          [&](const codecs::Pool& one) { return "Pool(block=" + number(one.block) + ")"; },
          [&](const codecs::PoolResidual& one) {
            return "PoolResidual(block=" + number(one.block) + ", bits=" + number(one.bits) + ")";
          },
          [&](const codecs::Project& one) {
            return "Project(ratio=" + number(one.ratio) + ", bits=" + number(one.bits) + ")";
          },
          [&](const codecs::RunningRange& one) {
            return "RunningRange(bits=" + number(one.bits) + ", decay=" + number(one.decay) + ")";
          },
          [&](const codecs::FewBit& one) { return "FewBit(bits=" + number(one.bits) + ")"; },
          [](const codecs::Exact&) { return std::string("Exact()"); },
          [](const codecs::Keep&) { return std::string("Keep()"); }},
      codec);
}

bool is_biased(const Codec& codec) {
  return std::holds_alternative<codecs::Pool>(codec) ||
         std::holds_alternative<codecs::FewBit>(codec);
}

void check_codec(const Codec& codec) {
  std::visit(Overloaded{[](const codecs::Quantize& one) {
                          check_one_of("Quantize", "bits", one.bits, {1, 2, 3, 4, 5, 6, 8, 16});
                        },
                        [](const codecs::Pool& one) { check_block("Pool", one.block); },
                        [](const codecs::PoolResidual& one) {
                          check_block("PoolResidual", one.block);
                          check_one_of("PoolResidual", "bits", one.bits, {1, 2, 3, 4, 8});
                        },
                        [](const codecs::Project& one) {
                          TORCH_CHECK_VALUE(one.ratio >= 2,
                                            "Project: ratio must be 2 or more, got ", one.ratio);
                          check_one_of("Project", "bits", one.bits, {1, 2, 3, 4, 5, 6, 8});
                        },
                        [](const codecs::RunningRange& one) {
                          check_one_of("RunningRange", "bits", one.bits, {2, 4, 8});
                          TORCH_CHECK_VALUE(one.decay >= 0 && one.decay < 1,
                                            "RunningRange: decay must be in [0, 1), got ",
                                            one.decay);
                        },
                        [](const codecs::FewBit& one) {
                          check_one_of("FewBit", "bits", one.bits, {2, 3, 4});
                        },
                        [](const codecs::Exact&) {}, [](const codecs::Keep&) {}},
             codec);
}

void check_selector(const Selector& where) {
  for (const auto& [name, pattern] : {std::pair("path", where.path), std::pair("op", where.op)}) {
    const auto open = pattern.rfind('[');
    TORCH_CHECK_VALUE(open == std::string::npos || pattern.find(']', open) != std::string::npos,
                      "codec: the ", name, " pattern '", pattern,
                      "' has a '[' without a ']'; a pattern takes *, ? and [abc]");
  }
  // Names of torch's operators have a namespace, those of autograd.Function classes do not.
  TORCH_CHECK_VALUE(where.op.find("::") != std::string::npos || !is_aten(where.op),
                    "codec: op must include the namespace, as in 'aten::gelu', got '", where.op,
                    "'");
  TORCH_CHECK_VALUE(where.min_bytes >= 0, "codec: min_bytes must be 0 or more, got ",
                    where.min_bytes);
}

}  // namespace backfold
