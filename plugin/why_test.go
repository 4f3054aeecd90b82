package plugin

import (
	"testing"

	"fairlead.dev/fairlead/dataplane"
)

// TestFirstOf: a difference is about a Service only if it has the whole name, or a whole address.
func TestFirstOf(t *testing.T) {
	others := []dataplane.Drift{
		{Object: "pool shop/cart-db:http cluster", Want: "10.244.1.7:80"}, {Object: "pool old-shop/cart local", Want: "x"},
		{Object: "frontend 10.96.0.1:8080/tcp any", Want: "x"}, {Object: "frontend 210.96.0.1:80/tcp any", Want: "x"},
	}
	marks := []string{"10.96.0.1:80", "[fd00::1]:80", "shop/cart"}
	if got := firstOf(others, marks); got != "" {
		t.Errorf("of another Service: %s", got)
	}
	for _, own := range []dataplane.Drift{
		{Object: "frontend 10.96.0.1:80/tcp any", Want: "x"}, {Object: "frontend [fd00::1]:80/tcp any", Want: "x"},
		{Object: "pool shop/cart:http cluster", Want: "x"}, {Object: "row", Have: "forward shop/cart"},
	} {
		if got := firstOf(append(others, own), marks); got != own.String() {
			t.Errorf("of %s: %s", own, got)
		}
	}
}
