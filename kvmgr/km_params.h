/* SPDX-License-Identifier: Apache-2.0 */
/* kvmgr/km_params.h - kvmgr's parameters as a struct (filled once at start). */
#ifndef KVMGR_KM_PARAMS_H
#define KVMGR_KM_PARAMS_H

#include "lib/base/params.h"

struct km_params {
#define PARAM(name, type, ...) PARAM_CTYPE_##type name;
#include "lib/base/params_common.def"
#include "kvmgr/km_params.def"
#undef PARAM
};

#endif
