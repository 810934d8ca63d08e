"""What the demo asks, and the solved examples that stand before every question. Data and their layout as text, nothing else."""

from __future__ import annotations

INSTRUCTION = "Answer each question in one short sentence.\n"

SHOTS: tuple[tuple[str, str], ...] = (
    ("What is the capital of Spain?", "The capital of Spain is Madrid, a city on the river Manzanares."),
    (
        "Which planet is known as the red planet?",
        "Mars is the red planet, because rust on its surface gives it its colour.",
    ),
    ("Who wrote the play Hamlet?", "William Shakespeare wrote Hamlet around the year 1600."),
    ("What is the chemical symbol of gold?", "The symbol of gold is Au, from its Latin name aurum."),
    ("How many legs does a spider have?", "A spider has eight legs, two more than an insect."),
    ("What is the longest river in South America?", "The Amazon is the longest river in South America."),
    ("Which gas do plants take from the air?", "Plants take carbon dioxide from the air and give back oxygen."),
    ("At what temperature does water freeze?", "Water freezes at zero degrees Celsius at sea level."),
    ("Who painted the Mona Lisa?", "Leonardo da Vinci painted the Mona Lisa in the sixteenth century."),
    ("What do bees make from nectar?", "Bees make honey from nectar and keep it in wax cells."),
    ("Which continent is the Sahara on?", "The Sahara is a desert in the north of Africa."),
    ("How many sides does a hexagon have?", "A hexagon has six sides and six corners."),
    ("What is the smallest prime number?", "The smallest prime number is two, the only even one."),
    ("Which ocean lies between Europe and America?", "The Atlantic Ocean lies between Europe and America."),
    ("What is frozen water called?", "Frozen water is called ice, and it floats on water."),
    ("Who first walked on the Moon?", "Neil Armstrong was the first person to walk on the Moon, in 1969."),
    ("What language is spoken in Brazil?", "Most people in Brazil speak Portuguese."),
    (
        "Which organ pumps blood through the body?",
        "The heart pumps blood through the body about seventy times a minute.",
    ),
    ("How many minutes are there in two hours?", "There are 120 minutes in two hours."),
    ("What is the tallest animal on land?", "The giraffe is the tallest animal on land."),
    (
        "Which metal is liquid at room temperature?",
        "Mercury is liquid at room temperature and was used in thermometers.",
    ),
    ("What is the capital of Canada?", "The capital of Canada is Ottawa, in the province of Ontario."),
    ("Who discovered penicillin?", "Alexander Fleming discovered penicillin in London in 1928."),
    ("What is the square root of 81?", "The square root of 81 is nine, since nine times nine is 81."),
    ("Which bird cannot fly but swims very well?", "The penguin cannot fly, but it is a very good swimmer."),
    ("What do we call a baby cat?", "A baby cat is called a kitten."),
    ("In which country are the pyramids of Giza?", "The pyramids of Giza are in Egypt, near Cairo."),
    ("What is the largest organ of the human body?", "The skin is the largest organ of the human body."),
    ("Which season comes after summer?", "Autumn comes after summer, and winter comes after autumn."),
    ("What instrument has 88 keys?", "A modern piano has 88 keys, 52 white and 36 black."),
    ("What is the opposite of north?", "The opposite of north is south."),
    ("Which insect turns from a caterpillar into a winged adult?", "A caterpillar turns into a butterfly or a moth."),
    ("What is the currency of Japan?", "The currency of Japan is the yen."),
    ("How many strings does a violin have?", "A violin has four strings, tuned in fifths."),
    ("Which star is closest to the Earth?", "The Sun is the star closest to the Earth."),
    ("What is the name for a person who studies the stars?", "A person who studies the stars is called an astronomer."),
    ("Which vitamin does the skin make in sunlight?", "The skin makes vitamin D when the sun shines on it."),
    ("What is the main ingredient of bread?", "The main ingredient of bread is flour, most often from wheat."),
)
"""About 1,000 tokens as SmolLM2 counts them, with the instruction."""

QUESTIONS: tuple[str, ...] = (
    "What is the capital of France?",
    "Which planet is the largest in the solar system?",
    "Who wrote Romeo and Juliet?",
    "What is the chemical symbol of oxygen?",
    "How many days are there in a week?",
    "What is the capital of Italy?",
    "Which animal is known as the king of the jungle?",
    "At what temperature does water boil?",
    "What is the capital of Germany?",
    "How many legs does an insect have?",
    "Which ocean is the largest?",
    "What colour is the sky on a clear day?",
    "Who painted the Sistine Chapel ceiling?",
    "How many months are there in a year?",
    "What do cows eat?",
    "What is the capital of Japan?",
)


def few_shot_prompt(num_shots: int) -> str:
    """The instruction and the first `num_shots` solved examples: what all questions share.

    Example:
        >>> print(few_shot_prompt(1))
        Answer each question in one short sentence.
        Question: What is the capital of Spain?
        Answer: The capital of Spain is Madrid, a city on the river Manzanares.
        <BLANKLINE>
    """
    return INSTRUCTION + "".join(f"Question: {question}\nAnswer: {answer}\n" for question, answer in SHOTS[:num_shots])


def ask(question: str) -> str:
    """What follows the shared part for one question; the model goes on after `Answer:`."""
    return f"Question: {question}\nAnswer:"
