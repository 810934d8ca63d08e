import asyncio

from shared import QUESTIONS, ask, load

model, tokenizer = load()


async def main():
    calls = (asyncio.to_thread(ask, model, tokenizer, question) for question in QUESTIONS)
    for answer in await asyncio.gather(*calls):
        print(answer[0].tolist())


asyncio.run(main())
