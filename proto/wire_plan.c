/* SPDX-License-Identifier: Apache-2.0 */
/* Tables of plan.proto. */
#include "proto/wire_table.h"

#include "proto/plan.pb-c.h"

#define M struct msg_step_plan
#define P Tandem__V1__StepPlan
static const struct wire_field plan_rows[] = {
    WIRE_ROW_U64(step),       WIRE_ROW_U32(epoch_self), WIRE_ROW_U32(epoch_peer),
    WIRE_ROW_HASH(plan_hash), WIRE_ROW_U32(plan_bytes),
};
#undef M
#undef P
static const struct wire_struct plan_table =
    WIRE_STRUCT(tandem__v1__step_plan__descriptor, plan_rows);

#define M struct msg_step_done
#define P Tandem__V1__StepDone
static const struct wire_field done_rows[] = {
    WIRE_ROW_U64(step),
    WIRE_ROW_HASH(plan_hash),
    WIRE_ROW_U32(status),
    WIRE_ROW_U64(step_us),
};
#undef M
#undef P
static const struct wire_struct done_table =
    WIRE_STRUCT(tandem__v1__step_done__descriptor, done_rows);

const struct wire_type wire_plan_types[] = {
    {MSG_STEP_PLAN, "StepPlan", &plan_table,
     WIRE_PAYLOAD(struct msg_step_plan, plan, plan_bytes, const uint8_t *, 1, 1), NULL, NULL},
    {MSG_STEP_DONE, "StepDone", &done_table, WIRE_NO_PAYLOAD, NULL, NULL},
};
const size_t wire_plan_type_count = ARRAY_COUNT(wire_plan_types);
