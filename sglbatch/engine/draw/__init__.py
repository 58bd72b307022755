"""Drawing tokens: ``race`` has the random numbers, ``torch`` draws on a CPU and is the oracle, ``triton`` on a GPU."""
