/* SPDX-License-Identifier: Apache-2.0 */
/* router/rt_params.h - the router's parameters as a struct (filled once at start). */
#ifndef ROUTER_RT_PARAMS_H
#define ROUTER_RT_PARAMS_H

#include "lib/base/params.h"

struct rt_params {
#define PARAM(name, type, ...) PARAM_CTYPE_##type name;
#include "lib/base/params_common.def"
#include "router/rt_params.def"
#undef PARAM
};

#endif
