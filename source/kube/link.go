package kube

import (
	"crypto/tls"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// maxReminder is the longest time between two lines about one problem.
const maxReminder = 10 * time.Minute

// link knows how the conversation with the API server goes, and logs when a problem begins, from time
// to time while it lasts, and when it ends. Problems that come and go say no more than lasting ones.
type link struct {
	log      *slog.Logger
	server   string
	interval time.Duration // between the first two lines about one problem

	mu       sync.Mutex
	problems map[problem]*course
}

// problem is what is wrong, with which resource; empty: with the server, whatever is asked for.
type problem struct{ resource, what, advice string }

// course is how a problem went on.
type course struct {
	since  time.Time // zero: it is over
	logged bool      // that it began
	next   time.Time // when it may be logged again
	pause  time.Duration
}

func newLink(c *Client) *link {
	return &link{log: c.log, server: c.server, interval: c.timing.reminder, problems: map[problem]*course{}}
}

// failed is told of every request that failed.
func (l *link) failed(resource string, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	t, now := diagnose(resource, err), time.Now()
	c := l.problems[t]
	if c == nil {
		c = &course{pause: l.interval}
		l.problems[t] = c
	}
	if c.since.IsZero() {
		c.since, c.logged = now, false
	}
	if now.Before(c.next) {
		return
	}
	c.logged = true
	c.next, c.pause = now.Add(c.pause), min(2*c.pause, maxReminder)
	l.log.Warn(t.what, "resource", resource, "server", l.server, "since", c.since.Format(time.RFC3339),
		"error", err, "advice", t.advice)
}

// works is told of every answer.
func (l *link) works(resource string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for t, c := range l.problems {
		switch {
		case t.resource != "" && t.resource != resource:
		case !c.since.IsZero():
			if c.logged {
				l.log.Info("the API server serves again", "reason", t.what, "resource", resource, "server", l.server,
					"took", time.Since(c.since).Round(time.Millisecond))
			}
			c.since = time.Time{}
		case time.Since(c.next) > maxReminder:
			delete(l.problems, t)
		}
	}
}

// diagnose finds out what an error is about.
func diagnose(resource string, err error) problem {
	const kept = "; meanwhile everything stays as it is"
	var certificate *tls.CertificateVerificationError
	var status apierrors.APIStatus
	switch {
	case errors.As(err, &certificate):
		return problem{"", "the API server's certificate is not accepted",
			"check the certificate authority and the server's address in the kubeconfig" + kept}
	case apierrors.IsUnauthorized(err):
		return problem{"", "the API server does not accept the credentials",
			"renew the token or client certificate; files of them are read again by themselves" + kept}
	case apierrors.IsForbidden(err):
		advice := "bind the user to cluster role system:node-proxier"
		if strings.HasPrefix(resource, podsResource) {
			advice = "readinessGate needs the rights to list and watch pods, and to patch pods/status"
		}
		return problem{resource, "the API server forbids a request", advice + kept}
	case errors.As(err, &status):
		return problem{resource, "the API server answers with an error", "see the server's log" + kept}
	}
	return problem{"", "the API server does not answer",
		"check that it runs, its address, and the network in between" + kept}
}
