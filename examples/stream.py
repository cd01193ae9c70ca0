"""Text as it comes: a piece per pass, several tokens at a time."""

from forestream import Generator

generator = Generator.from_pretrained("adapters/smollm2-135m-e2e")
for piece in generator.stream("name[The Mill], food[Italian], customer rating[high] ->", max_new_tokens=48):
    print(piece, end="", flush=True)
print()
