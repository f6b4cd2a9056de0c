// SPDX-License-Identifier: Apache-2.0

#include "torch/probe/comeback.h"

#include <algorithm>
#include <map>

#include "torch/codec/shares.h"
#include "torch/probe/probe.h"
#include "torch/store/geometry.h"

namespace backfold::torch_layer {

at::Tensor Leaf::view_of(const at::Tensor& folded, const View& view) const {
  if (view == view_in_span(tensor, 0)) return folded;
  if (!tensor.is_non_overlapping_and_dense() || folded.strides() != tensor.strides()) return {};
  View inside = view;
  inside.offset += folded.storage_offset() - tensor.storage_offset();
  const Span whole{folded.storage_offset(), folded.numel()};
  if (!whole.contains(span_of(inside))) return {};
  return tensor_at(folded.storage(), inside, tensor.scalar_type());
}

at::Tensor Comeback::with(const Fold& fold) const {
  if (!derived) {
    const at::Tensor folded = fold(*leaves[0]);
    return folded.defined() ? folded : tensor;
  }
  std::map<const Leaf*, at::Tensor> folded;  // each leaf once, however often it is used
  const auto other = [&](const Hold& hold, const View& view) -> at::Tensor {
    for (const auto& leaf : leaves) {
      if (leaf->reference.get() != &hold) continue;
      const auto [at, first] = folded.try_emplace(leaf.get());
      if (first) at->second = fold(*leaf);
      return at->second.defined() ? leaf->view_of(at->second, view) : at::Tensor();
    }
    return {};
  };
  const auto made = derived->with(other);
  return made ? tensor_at(made->storage(), view_in_span(tensor, 0), tensor.scalar_type()) : tensor;
}

std::vector<const Site*> Comeback::roots() const {
  std::vector<const Site*> roots;
  for (const auto& leaf : leaves)
    if (std::find(roots.begin(), roots.end(), &root_of(leaf->site)) == roots.end())
      roots.push_back(&root_of(leaf->site));
  return roots;
}

Comeback Probe::comeback_of(const at::Tensor& tensor, Site& site,
                            const std::shared_ptr<ProbedCall>& call, Store& store) {
  Comeback comeback{tensor.is_leaf() ? tensor : tensor.tensor_data(), nullptr, {}};
  if (site.packs_copied) {
    const at::Tensor source = store.copied_by(tensor);
    if (source.defined()) {
      auto leaf = std::make_shared<Leaf>(Leaf{site, source, call, store.refer_to(source)});
      leaves_[leaf->reference.get()] = leaf;
      comeback.derived = store.derivation_of(tensor, site);
      comeback.leaves.push_back(std::move(leaf));
      if (comeback.derived) return comeback;
      comeback.leaves.clear();
    }
  }
  if (site.derived) comeback.derived = store.derivation_of(tensor, site);
  if (comeback.derived) {
    for (const Hold* reference : comeback.derived->references())
      if (const auto leaf = leaves_[reference].lock()) comeback.leaves.push_back(leaf);
    if (!comeback.leaves.empty()) return comeback;
    comeback.derived = nullptr;
  }
  auto leaf = std::make_shared<Leaf>(Leaf{site, comeback.tensor, call, store.refer_to(tensor)});
  leaves_[leaf->reference.get()] = leaf;
  comeback.leaves.push_back(std::move(leaf));
  return comeback;
}

at::Tensor Probe::folded(const Leaf& leaf, int bits, const Key& key) {
  const at::Tensor folded =
      round_trip(leaf.tensor, format_of(leaf.site, leaf.tensor, bits), key, leaf.call->by);
  if (leaf.call->shares_along) restore_sums(folded, *leaf.call->shares_along);
  return folded;
}

at::Tensor Probe::folded_only(const Comeback& comeback) {
  return comeback.with([&](const Leaf& leaf) {
    // All readers of a packet see the same numbers: the key is the packet's, not the reader's.
    const Site& root = root_of(leaf.site);
    return &root == only_ ? folded(leaf, only_bits_, {seed_ + only_draw_, root.hash})
                          : at::Tensor();
  });
}

}  // namespace backfold::torch_layer
