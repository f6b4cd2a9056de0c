// SPDX-License-Identifier: Apache-2.0
//
// Autograd's doors for a program without Python: an engine that hands out our hooks to whatever is
// saved on a thread that is inside an entry.

#include <dlfcn.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <optional>

#include "torch/capture/entry.h"

namespace backfold::torch_layer {
namespace {

class Hooks : public torch::autograd::SavedVariableHooks {
 public:
  void call_pack_hook(const at::Tensor& tensor) override {
    Entry* entry = Entry::current();
    saved_.emplace(entry ? entry->save(tensor) : save_outside(tensor));
  }

  at::Tensor call_unpack_hook() override { return saved_->unpack(); }

 private:
  std::optional<Saved> saved_;
};

class FoldingEngine : public torch::autograd::Engine {
 public:
  ~FoldingEngine() override { stop(); }

  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    if (!Entry::current()) return nullptr;
    return std::make_unique<Hooks>();
  }
};

torch::autograd::Engine& folding_engine() {
  static FoldingEngine engine;
  return engine;
}

// The engine stays once it is set: it does nothing for threads outside of entries.
void install_engine() {
  // Looked up by name, because this library knows no Python. Its engine must not be displaced.
  const auto is_initialized = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "Py_IsInitialized"));
  TORCH_CHECK(!is_initialized || !is_initialized(),
              "backfold: Python is loaded, so hooks go through it: import backfold there first");
  torch::autograd::set_default_engine_stub(&folding_engine);
}

HookInstaller installer = {install_engine, [] {}};

}  // namespace

void set_hook_installer(const HookInstaller& other) { installer = other; }
const HookInstaller& hook_installer() { return installer; }

}  // namespace backfold::torch_layer
