# SPDX-License-Identifier: Apache-2.0
"""The KV pool: what a second turn brings along, and what survives deaths, evictions, restarts."""
import random

import cluster
from cluster import Cluster, wait_for

BLOCK = 16
WORDS = ("owl code green river stone letter garden window yellow seven winter bridge paper orange "
         "station silver morning doctor simple market number forest engine island").split()


def prose(words, seed):
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(words))


class Talk:
    """A conversation that grows: every turn sends all of it, and is asked for again cold (under a
    salt that nobody had before) to compare the text and to see that nothing came from elsewhere."""

    def __init__(self, c, name, salt="tenant", words=60, answer=48, compare=True):
        self.c, self.name, self.salt, self.answer = c, name, salt, answer
        self.ids = c.post("/tokenize", {"prompt": prose(words, name)}).json()["tokens"]
        self.before = 0          # tokens of the conversation so far, the last answer included
        self.colds = 0
        self.compare = compare
        self.seed = sum(name.encode())

    def ask(self, salt, session=True):
        fields = {"session_id": self.name} if session else {}
        got = self.c.stream(self.ids, path="/v1/completions", return_token_ids=True,
                            temperature=0.7, top_p=0.9, seed=self.seed, max_tokens=self.answer,
                            cache_salt=salt, ignore_eos=True, **fields)
        assert got.done and got.error is None, (got.error, self.c.tails())
        return got

    def turn(self, hit=True):
        """One turn; hit: it must resume; False: it must not; None: either.  Returns the tokens
        that came from the cache."""
        warm = self.ask(self.salt)
        cached = warm.usage["prompt_tokens_details"]["cached_tokens"]
        assert cached == warm.usage["tandem"]["cached_tokens"], warm.usage
        prompt = warm.usage["prompt_tokens"]
        if hit and self.before:
            new = prompt - self.before
            assert new >= 0 and cached >= prompt - BLOCK - new and cached < prompt, \
                (self.name, cached, prompt, new, self.c.health("kvmgr"))
        if hit is False:
            assert cached == 0, (self.name, cached, prompt)
        if self.compare:
            self.colds += 1
            cold = self.ask(f"cold {self.name} {self.colds}", session=False)
            assert cold.usage["prompt_tokens_details"]["cached_tokens"] == 0, cold.usage
            assert cold.ids == warm.ids and cold.text == warm.text, (cold.text, warm.text)
        self.before = prompt + warm.usage["completion_tokens"]
        assert len(warm.ids) == warm.usage["completion_tokens"], warm.usage
        rng = random.Random(f"{self.name} {self.before}")
        self.ids += warm.ids + [rng.choice(self.ids) for _ in range(rng.randrange(1, 12))]
        return cached


def test_second_turn_is_warm():
    with Cluster(kvmgr__block_tokens=BLOCK) as c:
        talk = Talk(c, "first")
        talk.turn(hit=False)
        for _ in range(4):
            assert talk.turn() > 0
        other = Talk(c, "first", salt="somebody else", compare=False)
        other.turn(hit=False)
        c.ledger_settles()
        c.pool_settles()
        page = c.request("GET", "/metrics").body.decode()
        assert "tandem_worker_cached_tokens_total" in page


if __name__ == "__main__":
    cluster.main(globals())
