/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/text/detokenizer.h"

#include "lib/base/check.h"
#include "lib/base/str.h"
#include "lib/text/tokenizer.h"

#define DETOKENIZER_MAGIC 0x64746f6bu

void detokenizer_init(struct detokenizer *d, const struct tokenizer *tokenizer, bool skip_special)
{
    CHECK(d != NULL && tokenizer != NULL);
    *d = (struct detokenizer){
        .magic = DETOKENIZER_MAGIC, .skip_special = skip_special, .tokenizer = tokenizer};
}

enum err detokenizer_add(struct detokenizer *d, uint32_t id, struct str *out)
{
    CHECK_OBJ(d, DETOKENIZER_MAGIC);
    CHECK(out != NULL);
    size_t count = 0;
    const uint8_t *bytes = tokenizer_bytes(d->tokenizer, id, &count);
    if (bytes == NULL)
        return ERR_INVALID;
    if (d->skip_special && tokenizer_is_special(d->tokenizer, id))
        return ERR_OK;
    utf8_stream_add(&d->utf8, bytes, count, out);
    return ERR_OK;
}

void detokenizer_end(struct detokenizer *d, struct str *out)
{
    CHECK_OBJ(d, DETOKENIZER_MAGIC);
    CHECK(out != NULL);
    utf8_stream_end(&d->utf8, out);
}
