"""Built-in texts: the primer that precedes documents, and the test of reuse quality.

Passages and questions share no sentence with the primer, because good results on text that
resembles the primer would prove little.
"""

from __future__ import annotations

__all__ = ["INTRODUCTION", "PASSAGES", "PRIMER", "QUESTIONS", "TEXT_ENDING"]

PRIMER = """\
The following pages were put together from several sources. Each part stands on its own and can be \
read without the others; the order has no meaning. Where a part speaks of times, places or \
amounts, these belong to that part alone.

A general remark comes first. Texts of this kind are written by different hands, some short and \
plain, some longer and with more detail. Names are given in full where they appear for the first \
time. Numbers are written as they were found. Nothing was left out on purpose, and nothing was \
added that the writers did not say themselves.

Readers usually look for one thing only and pass over the rest. That is why each part begins with \
what it is about and goes on to particulars afterwards. It may help to keep in mind that two parts \
can use the same word for different things, and that a later part need not agree with an earlier \
one. If something is not mentioned, it is simply not known.

The weather on the day of writing was mild. The window stood open, a cart went by in the street, \
and somewhere in the house a clock struck the hour. Paper, ink and a lamp were on the table, as on \
any other evening. Such things do not matter for what comes next; they only fill the time until \
the work begins.

Here ends the general part. What follows is the first of the texts themselves.

"""

INTRODUCTION = "Read the notes below, then answer the question.\n\n"

PASSAGES = (
    "The Halden bakery opens at five in the morning. Its owner, Marta Quist, bakes forty rye "
    "loaves before the first customer comes and sells the last of them by noon. On Fridays there "
    "is also a cake with plums, which her brother Anton brings from his orchard. The oven was "
    "built in 1931 and burns beech wood only.\n\n",
    "Flight 417 to Bergen leaves from gate twelve. The machine was late because of fog over the "
    "sea, and the captain, Ruth Adeyemi, told the passengers that they would land at twenty past "
    "nine. Bags may weigh eighteen kilograms. Children under two travel without a seat of their "
    "own.\n\n",
    "The museum of glass shows a green goblet that was found in a well near Arles. It is thought "
    "to be sixteen hundred years old. The keeper, Paolo Serra, cleans it once a year with a "
    "brush of goat hair. Visitors see it behind a pane, on the second floor, next to a map of "
    "the Roman roads.\n\n",
    "To repair the pump, first close the blue valve and wait ten minutes. Then take off the lid "
    "with a wrench of size nineteen. The seal inside is made of rubber and must be changed every "
    "three years. The mechanic who wrote this, Ivo Lang, warns that the spring under the seal "
    "jumps out easily.\n\n",
    "In the spring regatta the boat Tern won by two lengths. Its crew of four had trained on "
    "Lake Orta since January. Their coach, Helga Brandt, is seventy years old and rows every "
    "day. The prize was a silver oar, and the losers paid for dinner at the inn by the "
    "harbour.\n\n",
    "The library of Sund lends seeds as well as books. Whoever takes a bag of beans in April "
    "brings back two bags in October. The idea came from Noor Haddad, a teacher, who keeps a "
    "list of ninety kinds in a red notebook. The most asked for is a yellow pumpkin from "
    "Chile.\n\n",
    "A letter from 1874 says that the bridge at Corran was paid for with tolls on salt. The "
    "builder, Duncan Reay, used granite from the island across the sound, and a ferry brought "
    "three blocks a day. The bridge was closed during the flood of 1903 and has carried only "
    "walkers since then.\n\n",
    "The night train from Lviv has nine cars, of which two are for sleeping. Its steward, Oksana "
    "Melnyk, serves tea with lemon at ten and wakes the travellers at six. The window in the "
    "last car cannot be opened. A ticket costs thirty-one euros, and dogs ride for half of "
    "that.\n\n",
)

QUESTIONS = (
    "Question: Who bakes the rye loaves, and what does the oven burn?",
    "Question: When does flight 417 land in Bergen?",
    "Question: What must be closed before the pump is repaired?",
    "Question: What does the steward of the night train serve at ten?",
)

TEXT_ENDING = "\nAnswer:"
