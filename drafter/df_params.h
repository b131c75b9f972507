/* SPDX-License-Identifier: Apache-2.0 */
/* drafter/df_params.h - the drafter's parameters as a struct (filled once at start). */
#ifndef DRAFTER_DF_PARAMS_H
#define DRAFTER_DF_PARAMS_H

#include "lib/base/params.h"

struct df_params {
#define PARAM(name, type, ...) PARAM_CTYPE_##type name;
#include "lib/base/params_common.def"
#include "drafter/df_params.def"
#undef PARAM
};

#endif
