/* SPDX-License-Identifier: Apache-2.0 */
/* worker/wk_params.h - the worker's parameters as a struct (filled once at start). */
#ifndef WORKER_WK_PARAMS_H
#define WORKER_WK_PARAMS_H

#include "lib/base/params.h"

struct wk_params {
#define PARAM(name, type, ...) PARAM_CTYPE_##type name;
#include "lib/base/params_common.def"
#include "worker/wk_params.def"
#undef PARAM
};

#endif
