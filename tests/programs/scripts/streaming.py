from threading import Thread

from shared import QUESTIONS, ask, load
from transformers import TextIteratorStreamer

model, tokenizer = load()
for question in QUESTIONS:
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    thread = Thread(target=ask, args=(model, tokenizer, question), kwargs={"streamer": streamer})
    thread.start()
    print([*streamer])
    thread.join()
