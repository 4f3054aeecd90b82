package said

import (
	"maps"
	"slices"
	"strings"
	"time"
)

// Share divides what may be said in a while among those of whom it is said, as a Room does. It belongs to one goroutine
// at a time.
type Share struct {
	Words int // in a While, of all together
	While time.Duration

	began, reported time.Time
	room            Room
	withheld        map[string]int
}

// May reports whether an owner may have another message now. It counts those that may not.
func (s *Share) May(who string, now time.Time) bool {
	if now.Sub(s.began) >= s.While {
		s.began, s.room = now, Room{Size: s.Words}
	}
	ok := s.room.Enter(who)
	if !ok {
		s.withhold(who)
	}
	return ok
}

// maxWithheld is of how many it is counted by name what they may not say.
const maxWithheld = 1000

func (s *Share) withhold(who string) {
	if s.withheld == nil {
		s.withheld = map[string]int{}
	}
	if _, ok := s.withheld[who]; !ok && len(s.withheld) >= maxWithheld {
		who = "others"
	}
	s.withheld[who]++
}

// Withheld is how many words were not said, and whose most of them are, first those of whom most was not said. It tells
// that once in a While; until then it is 0.
func (s *Share) Withheld() (n int, of []string) {
	now := time.Now()
	if len(s.withheld) == 0 || !s.reported.IsZero() && now.Sub(s.reported) < s.While {
		return 0, nil
	}
	for _, m := range s.withheld {
		n += m
	}
	of = slices.SortedFunc(maps.Keys(s.withheld), func(a, b string) int {
		if d := s.withheld[b] - s.withheld[a]; d != 0 {
			return d
		}
		return strings.Compare(a, b)
	})
	s.reported, s.withheld = now, nil
	return n, of
}

// NamespaceOf returns the namespace of an object, such as "Service default/web" or "Namespace default". For other
// things, as a line in a file, it returns their name without the line.
func NamespaceOf(object string) string {
	if kind, name, ok := strings.Cut(object, " "); ok {
		if kind == "Namespace" {
			return name
		}
		if namespace, _, ok := strings.Cut(name, "/"); ok && !strings.Contains(namespace, "/") && namespace != "" {
			return namespace
		}
	}
	if i := strings.LastIndexByte(object, ':'); i > 0 {
		return object[:i]
	}
	return object
}
