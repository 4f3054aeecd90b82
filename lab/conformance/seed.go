package conformance

import (
	"os"
	"strconv"
	"time"
)

// The environment says how random tests begin and how long they go on, and whether others go on longer than usual.
const (
	seedVariable  = "FAIRLEAD_SEED"  // the first seed; the clock if it is not set
	seedsVariable = "FAIRLEAD_SEEDS" // how many seeds, from the first on
	casesVariable = "FAIRLEAD_CASES" // "all": also those that tests leave out to save time
)

// firstSeed is what repeats a random test, which prints it.
func firstSeed() uint64 {
	if n, err := strconv.ParseUint(os.Getenv(seedVariable), 10, 64); err == nil {
		return n
	}
	return uint64(time.Now().UnixMilli())
}

func seeds(usual int) int {
	if n, err := strconv.Atoi(os.Getenv(seedsVariable)); err == nil {
		return n
	}
	return usual
}

func allCases() bool { return os.Getenv(casesVariable) == "all" }
