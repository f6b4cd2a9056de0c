// SPDX-License-Identifier: Apache-2.0
//
// How tensors are best packed: layouts of the group quantizer and codecs of the menu, ranked by the
// squared error of the tensor itself, layouts also by their time on the tensor's device. Only the
// best layout is worth measuring in a gradient.

#ifndef BACKFOLD_TORCH_PROBE_RANKINGS_H_
#define BACKFOLD_TORCH_PROBE_RANKINGS_H_

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <vector>

#include "backfold/codecs.h"
#include "torch/capture/site.h"

namespace backfold::torch_layer {

// The site whose packet holds the tensors of a site.
const Site& root_of(const Site& site);

// The format that a site's tensor would be packed in.
GroupFormat format_with(const Site& site, const at::Tensor& tensor, const Choice& choice);

// a - b in fp32, or in fp64 for tensors of that type.
at::Tensor difference(const at::Tensor& a, const at::Tensor& b);

class Rankings {
 public:
  using NextKey = std::function<Key()>;

  // Sets the codecs to rank beside the group quantizer.
  void offer(std::vector<Codec> menu) { menu_ = std::move(menu); }

  // Takes the errors of the first tensor seen of a root, at `bits` bits. `by`, if given, says how
  // the tensor's norm normalises it.
  void rank(const at::Tensor& tensor, const Site& site, int bits, const NextKey& next_key,
            const std::optional<Normalisation>& by);

  // Ranks by the errors gathered so far, reading them from their devices.
  void settle();

  bool knows(const Site& root) const { return rankings_.contains(&root); }
  // Flat for an unknown root.
  Grouping best(const Site& root) const;
  // A table with the ranked grouping and offers, but without errors. The root must be known.
  Sensitivity table(const Site& root) const;

 private:
  struct Ranking {
    std::vector<Grouping> groupings;
    int bits = 0;
    c10::DeviceType device = c10::DeviceType::CPU;
    c10::SmallVector<Sensitivity::Offer, 1> offers;
    std::vector<at::Tensor> errors;  // of the groupings, then of the offers, until settle()
    Grouping best;
  };

  std::vector<Codec> menu_;
  std::map<const Site*, Ranking> rankings_;  // by root
};

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_PROBE_RANKINGS_H_
