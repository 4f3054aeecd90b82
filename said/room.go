package said

// Room is for so many things, each of an owner. An owner may have as many as there is room left for: one alone half of
// it, another one that comes later half of the rest. So the owner with most leaves room for all others. It belongs to
// one goroutine at a time.
type Room struct {
	Size int

	all int
	of  map[string]int
}

// Enter takes a place. It returns false if there is none for this name.
func (r *Room) Enter(who string) bool {
	if r.of[who] >= r.Size-r.all {
		return false
	}
	if r.of == nil {
		r.of = map[string]int{}
	}
	r.of[who]++
	r.all++
	return true
}

// Leave gives a place back.
func (r *Room) Leave(who string) {
	r.all--
	if r.of[who]--; r.of[who] == 0 {
		delete(r.of, who)
	}
}

// Len is how many are in it.
func (r *Room) Len() int { return r.all }
