# ./dev does the work, because a fresh machine has no make. "./dev help" tells more.

.PHONY: demo test lint generate build clean
demo test lint generate build clean:
	./dev $@

# make bench-Connect: the benchmarks whose names match
bench-%:
	./dev bench $*
