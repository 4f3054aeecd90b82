package ipvs

import (
	"encoding/binary"
	"fmt"
	"syscall"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// dumpSize is the most that the kernel lists at a time. It looks for the place where it was in a list from the list's
// beginning each time; with pages of 4 KiB, as package netlink asks for, that is most of what a long list takes.
const dumpSize = 32 << 10

// dump calls f with the nested attribute of each object that the kernel lists. The first part of the list is in the
// socket when the request has been sent, and each other one when the last has been read; receive therefore never waits.
func (d *director) dump(r request, kind uint16, f func(ad *netlink.AttributeDecoder) error) error {
	m, err := d.message(r, netlink.Dump)
	if err != nil {
		return err
	}
	if m, err = d.conn.Send(m); err != nil {
		return err
	}
	if d.buffer == nil {
		d.buffer = make([]byte, dumpSize)
	}
	var failed error // what follows is read all the same, as there is one list at a time
	for done := false; !done; {
		n, err := d.receive(d.buffer)
		if err != nil {
			return fmt.Errorf("list %s: %w", r.what, err)
		}
		if done, err = objects(d.buffer[:n], m.Header.Sequence, kind, f); err != nil {
			failed = fmt.Errorf("list %s: %w", r.what, err)
		}
	}
	return failed
}

// objects calls f with those in a part of the answer to a request, and reports whether that was the last one.
func objects(b []byte, sequence uint32, kind uint16, f func(*netlink.AttributeDecoder) error) (done bool, err error) {
	messages, err := syscall.ParseNetlinkMessage(b)
	if err != nil {
		return false, fmt.Errorf("parse an answer of %d bytes: %w", len(b), err)
	}
	for _, m := range messages {
		switch {
		case m.Header.Seq != sequence: // of an earlier listing, which was given up
		case m.Header.Type == unix.NLMSG_DONE || m.Header.Type == unix.NLMSG_ERROR:
			return true, errnoOf(m.Data)
		case len(m.Data) >= genlHeader:
			if err := object(m.Data[genlHeader:], kind, f); err != nil {
				return false, err
			}
		}
	}
	return false, nil
}

func object(attributes []byte, kind uint16, f func(*netlink.AttributeDecoder) error) error {
	ad, err := netlink.NewAttributeDecoder(attributes)
	if err != nil {
		return err
	}
	for ad.Next() {
		if ad.Type() == kind {
			ad.Nested(f)
		}
	}
	return ad.Err()
}

// errnoOf is what the kernel says at the end of a list, or in its place.
func errnoOf(b []byte) error {
	if len(b) < 4 {
		return nil
	}
	if n := int32(binary.NativeEndian.Uint32(b)); n < 0 {
		return unix.Errno(-n)
	}
	return nil
}
