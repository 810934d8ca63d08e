from shared import QUESTIONS, ask, load

model, tokenizer = load()
first, second = (ask(model, tokenizer, q, return_dict_in_generate=True, output_scores=True) for q in QUESTIONS[:2])
for output in (first, second):  # each has rows of its own
    print(output.past_key_values.get_seq_length(), [score.argmax().item() for score in output.scores])
    more = tokenizer.decode(output.sequences[0]) + " And"
    inputs = tokenizer(more, return_tensors="pt", return_token_type_ids=False)
    print(
        model.generate(**inputs, past_key_values=output.past_key_values, max_new_tokens=4, do_sample=False)[0].tolist()
    )
