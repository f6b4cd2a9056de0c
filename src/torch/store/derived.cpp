// SPDX-License-Identifier: Apache-2.0

#include "torch/store/derived.h"

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <numeric>

#include "torch/capture/undisturbed.h"
#include "torch/reads/recipes.h"
#include "torch/store/recent.h"

namespace backfold::torch_layer {
namespace {

// Operators from which on what a chain makes on its way is kept for who reads it next.
constexpr std::size_t kLongChain = 3;

// Sets the flags of the first run for the second.
class AsBefore {
 public:
  explicit AsBefore(const RunFlags& before) : now_(RunFlags::now()), differ_(!(before == now_)) {
    if (differ_) before.set();
  }
  ~AsBefore() {
    if (differ_) now_.set();
  }
  AsBefore(const AsBefore&) = delete;
  AsBefore& operator=(const AsBefore&) = delete;

 private:
  const RunFlags now_;
  const bool differ_;
};

// Puts a tensor where the list of another has an undefined one.
void fill_place(c10::List<std::optional<at::Tensor>> list, const at::Tensor& tensor) {
  for (std::size_t i = 0; i < list.size(); ++i) {
    const std::optional<at::Tensor> there = list.get(i);
    if (!there || there->defined()) continue;
    list.set(i, tensor);
    return;
  }
}

// Puts tensors back among the arguments. Those of a list have one position.
void place(std::vector<c10::IValue>& arguments, c10::ArrayRef<Source> sources,
           c10::ArrayRef<at::Tensor> tensors, std::vector<at::Tensor>& companions) {
  const auto count = static_cast<int>(arguments.size());
  for (std::size_t i = 0; i < sources.size(); ++i) {
    const int position = sources[i].position;
    if (position >= count) {
      companions.push_back(tensors[i]);
      continue;
    }
    c10::IValue& argument = arguments[static_cast<std::size_t>(position)];
    if (argument.isTensorList()) {
      argument.toTensorList().push_back(tensors[i]);
    } else if (argument.isOptionalTensorList()) {
      fill_place(argument.toOptionalTensorList(), tensors[i]);
    } else {
      argument = tensors[i];
    }
  }
}

std::vector<Site*> roots_of(c10::ArrayRef<Source> sources) {
  std::vector<Site*> roots;
  const auto add = [&](Site* site) {
    if (std::find(roots.begin(), roots.end(), site) == roots.end()) roots.push_back(site);
  };
  for (const Source& source : sources) {
    if (const auto* packet = std::get_if<std::shared_ptr<SharedPacket>>(&source.kept)) {
      if ((*packet)->is_planned()) add(&(*packet)->site());
    } else if (const auto* derived = std::get_if<std::shared_ptr<Derived>>(&source.kept)) {
      for (Site* site : (*derived)->roots()) add(site);
    }
  }
  return roots;
}

// Whether a storage still has the memory that is read: its owner may free it, as FSDP does.
bool holds(const c10::Storage& storage, const Source& source) {
  const Span span = span_of(source.view);
  return static_cast<std::size_t>(span.begin + span.count) * c10::elementSize(source.type) <=
         storage.nbytes();
}

}  // namespace

RunFlags RunFlags::now() {
  const at::Context& context = at::globalContext();
  return {at::get_num_threads(), context.userEnabledMkldnn(), context.userEnabledCuDNN(),
          context.deterministicCuDNN(), context.deterministicAlgorithms()};
}

void RunFlags::set() const {
  at::Context& context = at::globalContext();
  at::set_num_threads(threads);
  context.setUserEnabledMkldnn(mkldnn);
  context.setUserEnabledCuDNN(cudnn);
  context.setDeterministicCuDNN(deterministic_cudnn);
  context.setDeterministicAlgorithms(deterministic, context.deterministicAlgorithmsWarnOnly());
}

at::Tensor Source::get() const {
  struct Get {
    const Source& source;
    at::Tensor operator()(const std::shared_ptr<SharedPacket>& packet) const {
      return packet->restore(source.view, true);
    }
    at::Tensor operator()(const std::shared_ptr<Hold>& hold) const {
      return tensor_at(hold->storage(), source.view, source.type);
    }
    at::Tensor operator()(const std::shared_ptr<Derived>& derived) const {
      return tensor_at(derived->make(), source.view, source.type);
    }
  };
  return std::visit(Get{*this}, kept);
}

Allocated allocated_for(const Source& source) {
  if (const auto* packet = std::get_if<std::shared_ptr<SharedPacket>>(&source.kept)) {
    const std::int64_t bytes =
        (*packet)->span().count * static_cast<std::int64_t>(c10::elementSize(source.type));
    return {bytes, bytes, bytes};
  }
  if (const auto* derived = std::get_if<std::shared_ptr<Derived>>(&source.kept)) {
    const std::int64_t bytes = (*derived)->bytes();
    const Effort& effort = (*derived)->effort();
    return {bytes + effort.transient_for(bytes), bytes, std::max(bytes, effort.largest)};
  }
  return {};  // a reference
}

c10::SmallVector<std::size_t, 4> by_what_they_take(c10::ArrayRef<Source> sources) {
  c10::SmallVector<std::size_t, 4> order(sources.size());
  std::iota(order.begin(), order.end(), 0);
  const auto beside = [&](std::size_t i) {
    const Allocated allocated = allocated_for(sources[i]);
    return allocated.peak - allocated.bytes;
  };
  // Not std::stable_sort, which allocates: this runs for every derived tensor.
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return std::pair(-beside(a), a) < std::pair(-beside(b), b);
  });
  return order;
}

at::Tensor run_again(const Derived::Making& making, c10::ArrayRef<at::Tensor> sources,
                     const at::Tensor& bits, bool rounded) {
  const Undisturbed undisturbed;
  const at::DisableRecordFunctionGuard unwatched;
  std::vector<c10::IValue> arguments = making.arguments;
  for (c10::IValue& argument : arguments) {  // lists are shared by copies
    if (argument.isTensorList()) argument = c10::List<at::Tensor>();
    if (argument.isOptionalTensorList()) argument = argument.toOptionalTensorList().copy();
  }
  std::vector<at::Tensor> companions;
  place(arguments, making.sources, sources, companions);
  const Operator& op = *making.op;
  at::Tensor result =
      made_by_recipe({*op.recipe, *op.schema, arguments, companions, bits}, rounded);
  if (!result.defined()) {
    for (const int position : op.left_out) arguments[static_cast<std::size_t>(position)] = {};
    op.again->callBoxed(&arguments);
    result = arguments[0].toTensor();
  }
  // The first run may have written into memory of another type or layout.
  if (result.scalar_type() != making.type || result.strides() != making.view.strides ||
      result.storage_offset() != 0) {
    at::Tensor placed =
        allocate(making.view.sizes, making.view.strides, making.type, making.device);
    placed.copy_(result);
    result = placed;
  }
  return result;
}

Derived::Derived(Making making, Effort effort, const Site& site)
    : making_(std::move(making)),
      effort_(std::move(effort)),
      roots_(roots_of(making_.sources)),
      site_(site),
      flags_(RunFlags::now()) {
  for (const Source& source : making_.sources)
    if (const auto* derived = std::get_if<std::shared_ptr<Derived>>(&source.kept))
      (*derived)->expect_user();
}

Derived::~Derived() {
  drop_recent(this);
  if (ran_) return;
  for (const Source& source : making_.sources)
    if (const auto* derived = std::get_if<std::shared_ptr<Derived>>(&source.kept))
      (*derived)->awaited_.user_came();
}

void Derived::expect_user() {
  const std::lock_guard lock(mutex_);
  if (making_.op->product && !original_) awaited_.add_user();
}

void Derived::save(const c10::Storage& storage) {
  const std::lock_guard lock(mutex_);
  awaited_.add_reader();
  original_.emplace(storage.getWeakStorageImpl());
  original_bytes_ = storage.nbytes();
}

at::Tensor Derived::checked(const Source& source) const {
  const auto* hold = std::get_if<std::shared_ptr<Hold>>(&source.kept);
  if (!hold) return source.get();
  const auto lost = [&](const std::string& what) {
    return c10::str("backfold: a tensor of type ", source.type, " and sizes ",
                    at::IntArrayRef(source.view.sizes), " ", what, ". What ", making_.op->name,
                    " made of it, saved by ", site_.op->name, " (", site_.slot,
                    "), would have been made again from it. ");
  };
  const Counter& counter = source.counter;
  TORCH_CHECK(!counter.moved(),
              lost(c10::str("was modified in place before backward (version ", counter.now(),
                            ", expected ", counter.stood_at, ")")),
              "Run backward first, or set derive=False.");
  c10::Storage storage = (*hold)->storage();  // once: it may have to come from elsewhere
  TORCH_CHECK(holds(storage, source), lost("lost its memory before backward"), "Set derive=False.");
  return tensor_at(std::move(storage), source.view, source.type);
}

c10::Storage Derived::run() const {
  ran_ = true;
  const c10::DeviceGuard guard(making_.device);
  const AsBefore as_before(flags_);
  if (effort_.rounded)
    if (auto made = run_in_one_pass()) return *made;
  std::vector<at::Tensor> tensors(making_.sources.size());
  for (const std::size_t i : by_what_they_take(making_.sources))
    tensors[i] = checked(making_.sources[i]);
  const at::Tensor bits = making_.bits && effort_.rounded ? making_.bits->get() : at::Tensor();
  return run_again(making_, tensors, bits, effort_.rounded).storage();
}

std::optional<at::Tensor> Derived::with(const Other& other) {
  Changed changed;
  return with(other, changed);
}

std::optional<at::Tensor> Derived::with(const Other& other, Changed& made_before) {
  if (const auto known = made_before.find(this); known != made_before.end()) return known->second;
  std::vector<at::Tensor> tensors;
  bool changed = false;
  for (const Source& source : making_.sources) {
    at::Tensor tensor;
    if (const auto* hold = std::get_if<std::shared_ptr<Hold>>(&source.kept)) {
      tensor = other(**hold, source.view);
    } else if (const auto* derived = std::get_if<std::shared_ptr<Derived>>(&source.kept)) {
      if (const auto made = (*derived)->with(other, made_before))
        tensor = tensor_at(made->storage(), source.view, source.type);
    }
    changed |= tensor.defined();
    tensors.push_back(tensor.defined() ? tensor : source.get());
  }
  std::optional<at::Tensor>& result = made_before[this];
  if (!changed) return result;
  at::Tensor bits;
  if (making_.op->recipe->on_rounded == Recipe::OnRounded::kBits)
    bits = tensor_at(make(), making_.view, making_.type);
  result = run_again(making_, tensors, bits, true);
  return result;
}

std::vector<const Hold*> Derived::references() const {
  std::vector<const Hold*> all;
  Seen seen;
  references(all, seen);
  return all;
}

void Derived::references(std::vector<const Hold*>& all, Seen& seen) const {
  if (!seen.insert(this).second) return;
  for (const Source& source : making_.sources) {
    if (const auto* hold = std::get_if<std::shared_ptr<Hold>>(&source.kept)) {
      if (std::find(all.begin(), all.end(), hold->get()) == all.end()) all.push_back(hold->get());
    } else if (const auto* derived = std::get_if<std::shared_ptr<Derived>>(&source.kept)) {
      (*derived)->references(all, seen);
    }
  }
}

c10::Storage Derived::shared(bool share) {
  const std::optional<c10::Stream> now = current_stream(making_.device);
  if (kept_) {
    if (now && *now != *kept_on_) hand_over(kept_->data_ptr(), *kept_on_, *now);
    return *kept_;
  }
  if (share)
    if (auto earlier = made_.get(now)) return *earlier;
  const c10::Storage made = run();
  if (share) made_.set(made, now);
  return made;
}

c10::Storage Derived::make() {
  const std::lock_guard lock(mutex_);
  const c10::Storage made = shared(true);
  if (awaited_.user_came().last) return made;
  // Products are not to be run again for each who asks.
  if (effort_.products > 0) {
    if (!kept_) awaited_.keep(made);
  } else if (awaited_.readers() > 0 && !kept_ && effort_.operators.size() >= kLongChain) {
    keep_recent(this, made);
  }
  return made;
}

at::Tensor Derived::restore(const View& view, bool share) {
  const std::lock_guard lock(mutex_);
  const Awaited::Came came = awaited_.reader_came();
  if (original_)
    if (auto storage = original_->lock(); storage && storage->nbytes() == original_bytes_)
      return tensor_at(c10::Storage(std::move(storage)), view, making_.type);
  const c10::Storage made = shared(share);
  if (effort_.products > 0) {
    if (share && !kept_) awaited_.keep(made);
  } else if (came.last) {
    drop_recent(this);
  } else if (share && !kept_) {
    keep_recent(this, made);
  }
  return tensor_at(made, view, making_.type);
}

void Derived::keep() {
  const std::lock_guard lock(mutex_);
  if (kept_) return;
  kept_on_ = current_stream(making_.device);
  // Not the result's own memory, which may be next to change.
  kept_ = shared(true);
  making_.sources.clear();
  making_.bits.reset();
  awaited_.give_up();
}

void Derived::forget_original() {
  const std::lock_guard lock(mutex_);
  original_.reset();
}

}  // namespace backfold::torch_layer
