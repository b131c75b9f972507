/* SPDX-License-Identifier: Apache-2.0 */
/* gateway/gw_params.h - the gateway's parameters as a struct (filled once at start). */
#ifndef GATEWAY_GW_PARAMS_H
#define GATEWAY_GW_PARAMS_H

#include "lib/base/params.h"

struct gw_params {
#define PARAM(name, type, ...) PARAM_CTYPE_##type name;
#include "lib/base/params_common.def"
#include "gateway/gw_params.def"
#undef PARAM
};

#endif
