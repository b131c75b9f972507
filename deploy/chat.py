#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tandem chat: asks the cluster over its OpenAI API and prints the answer as it arrives."""
import argparse
import http.client
import json
import os
import sys
import threading
import time
import urllib.parse

DIM, RESET = ("\033[2m", "\033[0m") if sys.stdout.isatty() else ("", "")


class Progress:
    """A line on a terminal while nothing has arrived yet: long prompts take time."""

    def __init__(self):
        self.stop = threading.Event()
        self.thread = None

    def __enter__(self):
        if sys.stderr.isatty():
            self.thread = threading.Thread(target=self.run, daemon=True)
            self.thread.start()
        return self

    def run(self):
        start = time.monotonic()
        while not self.stop.wait(1.0):
            sys.stderr.write(f"\r\033[Kreading the prompt, {time.monotonic() - start:.0f} s")
            sys.stderr.flush()

    def done(self):
        if self.thread and not self.stop.is_set():
            self.stop.set()
            self.thread.join()
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()

    def __exit__(self, *_):
        self.done()


def events(response):
    """Yields the data objects of an SSE stream; comments are skipped."""
    for raw in response:
        line = raw.decode("utf-8").rstrip("\r\n")
        if not line.startswith("data: "):
            continue
        data = line[len("data: "):]
        if data == "[DONE]":
            return
        yield json.loads(data)


def ask(url, body):
    """Streams one answer to stdout; returns the assistant message for the history."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=600)
    content, reasoning, calls, printed = [], [], {}, ""
    with Progress() as progress:
        try:
            headers = {"Content-Type": "application/json"}
            key = os.environ.get("TANDEM_API_KEYS", "").replace(",", " ").split()
            if key:
                headers["Authorization"] = "Bearer " + key[0]
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            response = connection.getresponse()
        except OSError as error:
            progress.done()
            sys.exit(f"tandem chat: {url} does not answer: {error}")
        if response.status != 200:
            progress.done()
            text = response.read().decode("utf-8", "replace")
            try:
                text = json.loads(text)["error"]["message"]
            except (ValueError, KeyError, TypeError):
                pass
            sys.exit(f"tandem chat: {response.status}: {text}")
        for event in events(response):
            progress.done()
            if "error" in event:
                sys.exit(f"\ntandem chat: {event['error'].get('message')}")
            for choice in event.get("choices", []):
                delta = choice.get("delta", {})
                thought = delta.get("reasoning_content")
                if thought:
                    reasoning.append(thought)
                    if printed != "reasoning":
                        sys.stdout.write(DIM)
                        printed = "reasoning"
                    sys.stdout.write(thought)
                if delta.get("content"):
                    if printed == "reasoning":
                        sys.stdout.write(RESET + "\n")
                    printed = "content"
                    content.append(delta["content"])
                    sys.stdout.write(delta["content"])
                for piece in delta.get("tool_calls", []):
                    call = calls.setdefault(piece["index"], {"id": "", "name": "", "arguments": ""})
                    call["id"] = piece.get("id") or call["id"]
                    function = piece.get("function", {})
                    call["name"] = function.get("name") or call["name"]
                    call["arguments"] += function.get("arguments", "")
                sys.stdout.flush()
    connection.close()
    if printed == "reasoning":
        sys.stdout.write(RESET)
    if printed:
        print()
    for index in sorted(calls):
        print(f"call {calls[index]['name']}({calls[index]['arguments']})")
    message = {"role": "assistant", "content": "".join(content),
               "reasoning_content": "".join(reasoning)}
    if calls:
        message["tool_calls"] = [
            {"id": call["id"], "type": "function",
             "function": {"name": call["name"], "arguments": call["arguments"]}}
            for _, call in sorted(calls.items())]
    return message


def tool_results(message, messages):
    """In a conversation: asks the person for the result of each call."""
    for call in message.get("tool_calls", []):
        try:
            result = input(f"result of {call['function']['name']}> ")
        except EOFError:
            return False
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return bool(message.get("tool_calls"))


def main():
    parser = argparse.ArgumentParser(prog="tandem chat")
    parser.add_argument("--url", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--tools", metavar="FILE", help="JSON file: a list of tools, or one tool")
    parser.add_argument("--system", help="system message")
    parser.add_argument("--effort", choices=["low", "high", "max"])
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--spec", help="draft policy of this request: off, fixed:K, ngram:K")
    parser.add_argument("text", nargs="*")
    options = parser.parse_args()
    messages = [{"role": "system", "content": options.system}] if options.system else []
    body = {"messages": messages, "stream": True, "stream_options": {"include_usage": True}}
    if options.tools:
        try:
            with open(options.tools, encoding="utf-8") as file:
                tools = json.load(file)
        except (OSError, ValueError) as error:
            sys.exit(f"tandem chat: {options.tools}: {error}")
        if isinstance(tools, dict):
            tools = tools.get("tools", [tools])
        if not isinstance(tools, list) or not all(isinstance(t, dict) for t in tools):
            sys.exit(f"tandem chat: {options.tools}: must hold a list of tool definitions")
        body["tools"] = [t if "function" in t else {"type": "function", "function": t}
                         for t in tools]
    for name, value in (("reasoning_effort", options.effort), ("max_tokens", options.max_tokens),
                        ("temperature", options.temperature), ("seed", options.seed),
                        ("spec", options.spec)):
        if value is not None:
            body[name] = value
    if options.text:
        messages.append({"role": "user", "content": " ".join(options.text)})
        ask(options.url, body)
        return
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if not text.strip():
            continue
        messages.append({"role": "user", "content": text})
        message = ask(options.url, body)
        messages.append(message)
        while sys.stdin.isatty() and tool_results(message, messages):
            message = ask(options.url, body)
            messages.append(message)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
