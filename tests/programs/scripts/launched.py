from accelerate import Accelerator
from accelerate.utils import gather_object
from shared import QUESTIONS, ask, load

accelerator = Accelerator(cpu=True)
assert accelerator.num_processes == 2
model, tokenizer = load()
with accelerator.split_between_processes(QUESTIONS) as mine:
    answers = [ask(model, tokenizer, question)[0].tolist() for question in mine]
answers = gather_object(answers)
if accelerator.is_main_process:
    print(accelerator.num_processes, answers)
accelerator.end_training()
