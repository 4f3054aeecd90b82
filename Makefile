# ./dev does the work, because a fresh machine has no make. "./dev help" tells more.

.PHONY: demo test lint bench generate build image clean
demo test lint bench generate build image clean:
	./dev $@

# make bench-connect, bench-program, bench-change, bench-daemon
bench-%:
	./dev bench $*
