package share_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"fairlead.dev/fairlead/internal/share"
	"fairlead.dev/fairlead/lab/sample"
)

// holder is one of an owner.
type holder struct {
	share.Place
	owner   share.Owner
	used    int64
	yielded bool
}

func (h *holder) Used() int64 { return h.used }
func (h *holder) Yield()      { h.yielded = true }

// crowd is what is in a Pool, as its holders know it.
type crowd struct {
	*testing.T
	*share.Pool
	all []*holder
}

// enter has a holder enter. It returns nil if that was refused.
func (c *crowd) enter(o share.Owner) *holder {
	h := &holder{owner: o}
	if !c.Enter(&h.Place, o, 1, h) {
		return nil
	}
	c.all = append(c.all, h)
	return h
}

// fill has an owner enter until it is refused.
func (c *crowd) fill(o share.Owner) (n int) {
	for c.enter(o) != nil {
		n++
	}
	return n
}

// count is how many are in, by whatever name.
func (c *crowd) count(name func(share.Owner) string) map[string]int {
	c.all = slices.DeleteFunc(c.all, func(h *holder) bool { return h.yielded })
	n := map[string]int{}
	for _, h := range c.all {
		n[name(h.owner)]++
	}
	return n
}

func (c *crowd) want(name func(share.Owner) string, want map[string]int) {
	c.Helper()
	if got := c.count(name); !maps.Equal(got, want) {
		c.Errorf("there are %v, want %v", got, want)
	}
	if in := c.Used(); in != len(c.all) {
		c.Errorf("the pool counts %d of %d", in, len(c.all))
	}
}

func byNamespace(o share.Owner) string { return o.Namespace }
func byService(o share.Owner) string   { return o.Namespace + "/" + o.Service }
func byOwner(o share.Owner) string     { return fmt.Sprint(o) }

func client(i int) share.Client {
	return share.At(netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}))
}

// TestEnter: a client that is alone has all, and gives up as much as others need, until all have as much.
func TestEnter(t *testing.T) {
	t.Parallel()
	c := &crowd{T: t, Pool: share.New(60)}
	a := share.Of("a/web:http", client(1))
	if n := c.fill(a); n != 60 {
		t.Errorf("who is alone has %d places", n)
	}
	c.fill(share.Of("b/web", client(1)))
	c.want(byNamespace, map[string]int{"a": 30, "b": 30})
	c.fill(share.Of("c/web", client(1)))
	c.want(byNamespace, map[string]int{"a": 20, "b": 20, "c": 20})
	dns, other := share.Of("a/dns", client(1)), share.Of("a/dns", client(2))
	c.fill(dns)
	c.want(byService, map[string]int{"a/web": 10, "a/dns": 10, "b/web": 20, "c/web": 20})
	c.fill(other)
	c.want(byOwner, map[string]int{
		byOwner(a): 10, byOwner(dns): 5, byOwner(other): 5,
		byOwner(share.Of("b/web", client(1))): 20, byOwner(share.Of("c/web", client(1))): 20,
	})
}

// TestEnter_shares: whatever order owners come in, the places are divided max-min fairly among namespaces, within these
// among Services, and within these among clients.
func TestEnter_shares(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(sample.Seed(t), 0))
	for range 200 {
		c := &crowd{T: t, Pool: share.New(1 + random.IntN(100))}
		wants := demand{children: map[string]*demand{}}
		var comers []share.Owner
		for range 1 + random.IntN(12) {
			o := share.Of(fmt.Sprintf("%d/%d", random.IntN(3), random.IntN(3)), client(random.IntN(3)))
			n := random.IntN(40)
			wants.add(n, o.Namespace, byService(o), byOwner(o))
			comers = append(comers, slices.Repeat([]share.Owner{o}, n)...)
		}
		for range 30 { // a client that has yielded comes again
			c.count(byOwner)
			have := map[share.Owner]int{}
			for _, h := range c.all {
				have[h.owner]++
			}
			for _, i := range random.Perm(len(comers)) {
				if o := comers[i]; have[o] > 0 {
					have[o]--
				} else {
					c.enter(o)
				}
			}
		}
		got := c.count(byOwner)
		for name, n := range c.count(byService) {
			got[name] = n
		}
		for name, n := range c.count(byNamespace) {
			got[name] = n
		}
		wants.check(t, "all", got, c.Capacity())
	}
}

// demand is how many places an owner would like to have.
type demand struct {
	n        int
	children map[string]*demand
}

func (d *demand) add(n int, path ...string) {
	if d.n += n; len(path) == 0 {
		return
	}
	if d.children[path[0]] == nil {
		d.children[path[0]] = &demand{children: map[string]*demand{}}
	}
	d.children[path[0]].add(n, path[1:]...)
}

// check fails unless the children's places are max-min fair. A child that has less than it wants has no less than
// another one, but for the one place that cannot be divided.
func (d *demand) check(t *testing.T, name string, got map[string]int, all int) {
	t.Helper()
	if len(d.children) == 0 {
		return
	}
	sum := 0
	for child := range d.children {
		sum += got[child]
	}
	if sum != min(all, d.n) {
		t.Errorf("%s has %d of %d places and wants %d", name, sum, all, d.n)
	}
	for child, wants := range d.children {
		for other := range d.children {
			if got[child] < wants.n && got[child] < got[other]-1 {
				t.Errorf("%s has %d places and wants %d, %s has %d", child, got[child], wants.n, other, got[other])
			}
		}
		wants.check(t, child, got, got[child])
	}
}

// TestYield: of a client that has most the one yields that was quiet for longest.
func TestYield(t *testing.T) {
	t.Parallel()
	c := &crowd{T: t, Pool: share.New(4)}
	var all []*holder
	for range 4 {
		all = append(all, c.enter(share.Of("a/web", client(1))))
	}
	all[0].used, all[2].used = 1, 1
	for i, quietest := range []int{1, 3} {
		c.enter(share.Of("b/web", client(i)))
		if !all[quietest].yielded {
			t.Errorf("the quietest stays after %d have come", i+1)
		}
	}
	if c.enter(share.Of("a/web", client(1))) != nil {
		t.Error("a client beyond its share enters")
	}
}

// TestReplacing: a newcomer has the place of its client's quietest; of those of whom nothing is proven of that which came
// first, whatever client that is.
func TestReplacing(t *testing.T) {
	t.Parallel()
	c := &crowd{T: t, Pool: share.NewReplacing(4)}
	unproven := func(i int) share.Owner {
		o := share.Of("a/dns", client(i))
		o.Unproven = true
		return o
	}
	first, second := c.enter(unproven(1)), c.enter(unproven(2))
	c.Prove(&second.Place)
	c.enter(unproven(3))
	c.enter(unproven(4))
	for i := range 100 {
		if c.enter(unproven(100+i)) == nil {
			t.Fatal("a newcomer is refused")
		}
		if i == 0 && !first.yielded {
			t.Error("the first one stays")
		}
	}
	if second.yielded {
		t.Error("who has proven to be there yields to those who have not")
	}
}

// TestBorrow: what cannot be taken back is never all with one owner, and less of it with one client.
func TestBorrow(t *testing.T) {
	t.Parallel()
	p := share.New(900)
	borrow := func(o share.Owner) (n int) {
		for p.Borrow(&share.Place{}, o, 1) {
			n++
		}
		return n
	}
	for _, step := range []struct {
		owner share.Owner
		want  int
	}{
		{share.Of("a/web", client(1)), 600}, {share.Of("a/web", client(2)), 120}, {share.Of("a/dns", client(1)), 80},
		{share.Of("b/web", client(1)), 66},
	} {
		if got := borrow(step.owner); got != step.want {
			t.Errorf("%v borrows %d, want %d", step.owner, got, step.want)
		}
	}
}

// TestNext: namespaces have their turns, in these Services, and in these clients, however many wait.
func TestNext(t *testing.T) {
	t.Parallel()
	c := &crowd{T: t, Pool: share.New(100)}
	for _, s := range []struct {
		service string
		client  int
		n       int
	}{{"a/web", 1, 50}, {"a/web", 2, 2}, {"a/dns", 1, 2}, {"b/web", 1, 3}} {
		for range s.n {
			c.enter(share.Of(s.service, client(s.client)))
		}
	}
	var turns []string
	for range 8 {
		o := c.Next().(*holder).owner
		turns = append(turns, byService(o)+" "+fmt.Sprint(o.Client == client(1)))
	}
	want := []string{
		"a/web true", "b/web true", "a/dns true", "b/web true", "a/web false", "b/web true", "a/dns true", "a/web true",
	}
	if !slices.Equal(turns, want) {
		t.Errorf("turns %q", turns)
	}
	if c.Used() != 57-8 {
		t.Errorf("%d are left", c.Used())
	}
}

// TestClear: all yield, and no further ones enter.
func TestClear(t *testing.T) {
	t.Parallel()
	c := &crowd{T: t, Pool: share.New(10)}
	c.fill(share.Of("a/web", client(1)))
	left := c.enter(share.Of("b/web", client(1)))
	c.Clear()
	c.want(byNamespace, map[string]int{})
	c.Leave(&left.Place)
	if c.enter(share.Of("c/web", client(1))) != nil || c.Used() != 0 {
		t.Error("somebody enters")
	}
}

func TestAt(t *testing.T) {
	t.Parallel()
	same := func(a, b string, want bool) {
		t.Helper()
		if got := share.At(netip.MustParseAddr(a)) == share.At(netip.MustParseAddr(b)); got != want {
			t.Errorf("%s and %s are the same client: %t", a, b, got)
		}
	}
	same("10.0.0.1", "::ffff:10.0.0.1", true)
	same("10.0.0.1", "10.0.0.2", false)
	same("127.0.0.1", "127.1.2.3", true)
	same("2001:db8::1", "2001:db8::2:3", true)
	same("2001:db8::1", "2001:db8:0:1::1", false)
	same("fe80::1%eth0", "fe80::1%1", true)
}
