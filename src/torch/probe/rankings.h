// SPDX-License-Identifier: Apache-2.0
//
// How tensors are best packed: layouts of the group quantizer, and codecs of a menu beside it, by
// the squared error of the tensor itself. Only the best layout is worth measuring in a gradient.

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

// How a site's tensor would be packed.
GroupFormat format_with(const Site& site, const at::Tensor& tensor, const Choice& choice);

// In fp32, or fp64 for what is that wide.
at::Tensor difference(const at::Tensor& a, const at::Tensor& b);

class Rankings {
 public:
  using NextKey = std::function<Key()>;

  // Codecs to be ranked beside the group quantizer.
  void offer(std::vector<Codec> menu) { menu_ = std::move(menu); }

  // Takes the errors of the first tensor that is seen of a root, at `bits` bits.
  // `by`, where given, is how the tensor's norm normalises it.
  void rank(const at::Tensor& tensor, const Site& site, int bits, const NextKey& next_key,
            const std::optional<Normalisation>& by);

  // Ranks by the errors gathered so far; reads them from their devices.
  void settle();

  bool knows(const Site& root) const { return rankings_.contains(&root); }
  // Flat where nothing is known.
  Grouping best(const Site& root) const;
  // A table without errors, but with the grouping and offers that were ranked. Of a known root.
  Sensitivity table(const Site& root) const;

 private:
  struct Ranking {
    std::vector<Grouping> groupings;
    int bits = 0;
    c10::SmallVector<Sensitivity::Offer, 1> offers;
    std::vector<at::Tensor> errors;  // of the groupings, then of the offers, until it is settled
    Grouping best;
  };

  std::vector<Codec> menu_;
  std::map<const Site*, Ranking> rankings_;  // by root
};

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_PROBE_RANKINGS_H_
