// SPDX-License-Identifier: Apache-2.0

#include "torch/meeting.h"

#include <c10/util/Exception.h>

#include <utility>

#include "torch/state.h"

namespace backfold::torch_layer {

std::vector<Json> meet(State& state, const char* about, Json message) {
  Together& together = state.together;
  message["about"] = about;
  message["entry"] = together.entries;
  // An error's text may be in any encoding.
  const std::vector<std::string> sent =
      together.gather(message.dump(-1, ' ', false, Json::error_handler_t::replace));
  TORCH_CHECK(static_cast<int>(sent.size()) == together.size, "gather must return what each of ",
              together.size, " processes sent, got ", sent.size(), " answers");
  std::vector<Json> heard;
  for (std::size_t rank = 0; rank < sent.size(); ++rank) {
    Json one = parse_object(sent[rank], "what another process sent");
    const Fields fields{one, "what another process sent"};
    const auto theirs = fields.get<std::string>("about");
    const auto entry = fields.get<std::int64_t>("entry");
    TORCH_CHECK(theirs == about && entry == together.entries,
                "the processes are out of step: rank ", together.rank, " is at entry ",
                together.entries, " of the controller's block and speaks of ", about, ", rank ",
                rank, " is at entry ", entry, " and speaks of ", theirs,
                "; each must enter the block equally often with gradients enabled, or plan on its "
                "own (sync=False)");
    heard.push_back(std::move(one));
  }
  together.last = state.blocks.steps;
  return heard;
}

std::string of_rank(std::size_t rank, const std::string& what) {
  return "rank " + std::to_string(rank) + ": " + what;
}

}  // namespace backfold::torch_layer
