"""What the operating system gives: files, memory, threads, forks."""
