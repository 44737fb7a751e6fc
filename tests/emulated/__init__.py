"""A device whose streams are queues, and threads that take turns: every order of events that CUDA
and the scheduler allow can happen here, and a seed says which one does."""
