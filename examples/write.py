"""The shortest use: load the shipped adapter, write one text, and say in how many passes."""

from forestream import Generator

generator = Generator.from_pretrained("adapters/smollm2-135m-e2e")
result = generator.generate("name[Blue Spice], eatType[coffee shop], area[city centre] ->", max_new_tokens=48)
print(result.text)
print(f"{result.counters.generated} tokens in {result.counters.passes} passes after the prompt's")
