package ipvs

import (
	"cmp"
	"errors"
	"fmt"
	"os"

	"github.com/mdlayher/genetlink"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// Client is for the IPVS of the network namespace of the thread that opened it.
type Client struct {
	conn   *netlink.Conn
	family uint16 // generic netlink's number of IPVS
	buffer []byte // for lists
	places places
	// counter is the socket of Count, made is how many of what it counts are there by this client's requests: it may be
	// less than 0.
	counter, made int
}

// places are the positions of virtual servers in the kernel's list, from 1, by the last list of most of them. ipvsadm
// -C deletes all in that order, and the kernel keeps their real servers for some minutes, the last one first. When a
// real server is made again, the kernel searches all that are kept (ip_vs_trash_get_dest in
// net/netfilter/ipvs/ip_vs_ctl.c), and takes it out. If they are made in the reverse order, the first one that it meets
// is the right one.
type places map[Key]int

// note takes in a list.
func (p *places) note(list []Key) {
	if 2*len(list) < len(*p) {
		return
	}
	*p = make(places, len(list))
	for i, key := range list {
		(*p)[key] = i + 1
	}
}

// Compare orders virtual servers that are to be made: the kernel's time depends on it.
func (c *Client) Compare(a, b Key) int {
	return cmp.Or(cmp.Compare(c.places[b], c.places[a]), a.Compare(b))
}

// Made is how many of the virtual servers of Count this client has made, less those that it has deleted.
func (c *Client) Made() int { return c.made }

// Open loads the module, since Linux 5.6. The error is unix.ENOENT where the kernel has no IPVS.
func Open() (*Client, error) {
	conn, err := netlink.Dial(unix.NETLINK_GENERIC, nil)
	if err != nil {
		return nil, fmt.Errorf("open netlink socket: %w", err)
	}
	family, err := genetlink.NewConn(conn).GetFamily(genlName)
	if err != nil {
		_ = conn.Close() // the error before is the one that tells
		return nil, fmt.Errorf("find IPVS: %w", err)
	}
	counter, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, errors.Join(os.NewSyscallError("socket", err), conn.Close())
	}
	return &Client{conn: conn, family: family.ID, counter: counter}, nil
}

// Close may be repeated.
func (c *Client) Close() error {
	if c.conn == nil {
		return nil
	}
	conn := c.conn
	c.conn = nil
	return errors.Join(conn.Close(), unix.Close(c.counter))
}

func (c *Client) message(r Request, flags netlink.HeaderFlags) (netlink.Message, error) {
	ae := netlink.NewAttributeEncoder()
	r.encode(ae)
	attributes, err := ae.Encode()
	if err != nil {
		return netlink.Message{}, fmt.Errorf("encode %s: %w", r.what, err)
	}
	return netlink.Message{
		Header: netlink.Header{Type: netlink.HeaderType(c.family), Flags: netlink.Request | flags},
		Data:   append([]byte{r.command, genlVersion, 0, 0}, attributes...),
	}, nil
}

// batchSize is how many requests go to the kernel at once: their answers must fit into the socket.
const batchSize = 128

// Perform does the requests in their order and returns those that the kernel refuses. The error is one after which it
// is not known what has been done.
func (c *Client) Perform(requests []Request) (refused []*Refusal, err error) {
	absent := map[Key]bool{}
	for len(requests) > 0 {
		n := min(len(requests), batchSize)
		more, err := c.send(requests[:n], absent)
		refused = append(refused, more...)
		if err != nil {
			return refused, err
		}
		requests = requests[n:]
	}
	return refused, nil
}

// send does at most batchSize requests. Virtual servers that the kernel refuses are absent; that it then refuses
// their real servers as well is not worth an error each.
func (c *Client) send(requests []Request, absent map[Key]bool) (refused []*Refusal, err error) {
	errnos, err := c.ask(requests)
	if err != nil {
		return nil, err
	}
	for i, r := range requests {
		switch err := errnos[i]; {
		case err == 0:
			c.account(r)
			if r.done != nil {
				r.done()
			}
		case err == unix.EPERM:
			return refused, &Refusal{r, err}
		case err == unix.ESRCH && absent[r.Server]:
		default:
			refused = append(refused, &Refusal{r, err})
			absent[r.Server] = absent[r.Server] || r.command == cmdNewService
		}
	}
	return refused, nil
}

// account notes that a request has been done.
func (c *Client) account(r Request) {
	n := 0
	switch r.command {
	case cmdNewService:
		n = 1
	case cmdDelService:
		n = -1
		delete(c.places, r.Server)
	}
	if !r.Server.V6 { // as Count has it
		c.made += n
	}
}

// ask sends requests to the kernel and returns its answer to each, 0 for those it has done. Only the last asks to be
// acknowledged: errors are answered unasked, and requests are taken in their order. Reading an acknowledgement of
// each took half of the time of a first Sync.
func (c *Client) ask(requests []Request) (answers []unix.Errno, err error) {
	messages := make([]netlink.Message, len(requests))
	for i, r := range requests {
		if messages[i], err = c.message(r, 0); err != nil {
			return nil, err
		}
	}
	messages[len(messages)-1].Header.Flags |= netlink.Acknowledge
	if messages, err = c.conn.SendMessages(messages); err != nil {
		return nil, err
	}
	found, err := c.answers(messages[len(messages)-1].Header.Sequence)
	if err != nil {
		return nil, fmt.Errorf("change IPVS: %s and %d more: %w", requests[0].what, len(requests)-1, err)
	}
	for _, m := range messages {
		answers = append(answers, found[m.Header.Sequence])
	}
	return answers, nil
}
