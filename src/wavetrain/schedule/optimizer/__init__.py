"""How an order is found: built forward in time or from a periodic pattern, justified, annealed, and if asked polished by CP-SAT.

dispatch    runs the pipeline forward in time and chooses what each free rank does next
pattern     finds a steady state that repeats with every micro-batch, and unrolls it
justify     moves all actions as late, then as early, as they go, into any gap
anneal      random moves on the critical path
polish      CP-SAT with the best order as a hint (extra: solve)
bound       what no order can beat
construct   the first three together, for one placement
"""
