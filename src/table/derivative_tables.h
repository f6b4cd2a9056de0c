// SPDX-License-Identifier: Apache-2.0
//
// Written by scripts/derivative_tables, which says how: do not edit.

#ifndef BACKFOLD_TABLE_DERIVATIVE_TABLES_H_
#define BACKFOLD_TABLE_DERIVATIVE_TABLES_H_

#include <array>

#include "backfold/table.h"

namespace backfold::core {

struct DerivativeTable {
  Activation activation;
  int bits;
  double error;  // of the derivative, relative, in the L2 norm, for x ~ N(0, 1)
  std::array<float, 15> bounds;
  std::array<float, 16> values;
};

// clang-format off
inline constexpr DerivativeTable kDerivativeTables[] = {
    {Activation::kGelu, 2, 0.1325,
     {-0.498965f, -0.000005f, 0.498965f},
     {-0.872403f, -0.239289f, 0.239284f, 0.872403f}},
    {Activation::kGelu, 3, 0.0647,
     {-0.779325f, -0.469225f, -0.224005f, -0.000005f, 0.223995f, 0.469215f, 0.779325f},
     {-1.028949f, -0.613807f, -0.343107f, -0.111071f, 0.111061f, 0.343097f, 0.613802f, 1.028949f}},
    {Activation::kGelu, 4, 0.0359,
     {-2.046335f, -0.963325f, -0.741145f, -0.573485f, -0.430835f, -0.302055f, -0.181325f, -0.064915f, 0.050025f, 0.166075f, 0.285995f, 0.413365f, 0.553585f, 0.716725f, 0.927855f},
     {-2.358064f, -1.146828f, -0.844310f, -0.654037f, -0.500400f, -0.365416f, -0.241099f, -0.122842f, -0.007429f, 0.107807f, 0.225490f, 0.348721f, 0.481842f, 0.632171f, 0.815463f, 1.841979f}},
    {Activation::kGeluTanh, 2, 0.1326,
     {-0.499205f, -0.000005f, 0.499195f},
     {-0.873403f, -0.239374f, 0.239364f, 0.873397f}},
    {Activation::kGeluTanh, 3, 0.0647,
     {-0.780435f, -0.469635f, -0.224155f, -0.000005f, 0.224145f, 0.469635f, 0.780435f},
     {-1.031096f, -0.614500f, -0.343370f, -0.111142f, 0.111132f, 0.343365f, 0.614500f, 1.031096f}},
    {Activation::kGeluTanh, 4, 0.0359,
     {-2.054715f, -0.965035f, -0.742065f, -0.574005f, -0.431125f, -0.302195f, -0.181365f, -0.064865f, 0.050145f, 0.166275f, 0.286305f, 0.413835f, 0.554305f, 0.717865f, 0.929815f},
     {-2.366343f, -1.149433f, -0.845563f, -0.654736f, -0.500795f, -0.365626f, -0.241187f, -0.122836f, -0.007344f, 0.107966f, 0.225743f, 0.349105f, 0.482427f, 0.633079f, 0.816951f, 1.091599f}},
    {Activation::kSilu, 2, 0.1442,
     {-0.668535f, -0.000005f, 0.668535f},
     {-1.137772f, -0.316141f, 0.316135f, 1.137772f}},
    {Activation::kSilu, 3, 0.0714,
     {-1.126785f, -0.663955f, -0.314205f, -0.000005f, 0.314205f, 0.663955f, 1.126785f},
     {-1.496068f, -0.871789f, -0.481665f, -0.155178f, 0.155173f, 0.481665f, 0.871789f, 1.496068f}},
    {Activation::kSilu, 4, 0.0354,
     {-1.470635f, -1.114655f, -0.863805f, -0.658515f, -0.477965f, -0.311885f, -0.154055f, -0.000005f, 0.154045f, 0.311875f, 0.477955f, 0.658505f, 0.863795f, 1.114645f, 1.470625f},
     {-1.769962f, -1.272150f, -0.981455f, -0.757157f, -0.565929f, -0.393566f, -0.232246f, -0.076802f, 0.076792f, 0.232236f, 0.393556f, 0.565919f, 0.757147f, 0.981445f, 1.272140f, 1.769954f}},
};
// clang-format on

}  // namespace backfold::core

#endif  // BACKFOLD_TABLE_DERIVATIVE_TABLES_H_
