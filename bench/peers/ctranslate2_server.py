"""A minimal server that translates one request at a time with CTranslate2 called directly, for bench/serve.py.

    python bench/peers/ctranslate2_server.py RUN QUANTIZATION BEAM

It prints its port. It has no queue, no checks and no other routes: the least that one-at-a-time serving can cost. One
core or all of them work on a sentence, whichever is faster: for small models, one core often is.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ctranslate2
import uvloop

from dragoman.hardware import usable_cores
from dragoman.inference.engines.base import list_vocabulary
from dragoman.inference.engines.ctranslate2 import save_ctranslate2
from dragoman.inference.loading import load_as
from dragoman.inference.translator import Translator

TRIAL_TEXTS = [f"The old writer of the books sees {count} small dogs." for count in range(2, 22)]


async def serve(run: str, quantization: str, beam: int) -> None:
    translator = load_as(Translator, run, device="cpu")
    tokenizers = translator.tokenizers
    source_tokens, target_tokens = list_vocabulary(tokenizers.source), list_vocabulary(tokenizers.target)
    target_ids = {token: number for number, token in enumerate(target_tokens)}
    with tempfile.TemporaryDirectory() as folder:
        save_ctranslate2(translator, Path(folder), quantization)
        models = [
            ctranslate2.Translator(folder, intra_threads=threads, compute_type=quantization)
            for threads in (1, usable_cores())
        ]
    thread = ThreadPoolExecutor(1)
    trial = [[source_tokens[token] for token in tokenizers.source.encode(text)] for text in TRIAL_TEXTS]

    def measure(model: ctranslate2.Translator) -> float:
        start = time.perf_counter()
        for tokens in trial:
            model.translate_batch([tokens], beam_size=beam)
        return time.perf_counter() - start

    model = min(models, key=lambda model: min(measure(model) for _ in range(2)))

    def translate(text: str) -> str:
        tokens = [source_tokens[token] for token in tokenizers.source.encode(text)]
        [result] = model.translate_batch([tokens], beam_size=beam)
        return tokenizers.target.decode([target_ids[token] for token in result.hypotheses[0]])

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
            except asyncio.IncompleteReadError:
                break
            body = await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))
            text = await loop.run_in_executor(thread, translate, json.loads(body)["text"])
            found = json.dumps({"translations": [{"text": text}]}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(found), found))
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1], sys.argv[2], int(sys.argv[3])))
