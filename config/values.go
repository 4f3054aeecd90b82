package config

import (
	"fmt"
	"net"
	"reflect"
	"strconv"
	"strings"

	netutils "k8s.io/utils/net"
)

// stringValue is a flag whose text must look like something, unless check is nil. Empty text then leaves the value as
// it is, as with kube-proxy.
type stringValue struct {
	to    reflect.Value
	kind  string
	check func(string) error
}

func (v stringValue) String() string { return v.to.String() }

func (v stringValue) Type() string { return v.kind }

func (v stringValue) Set(text string) error {
	if v.check != nil {
		if text == "" {
			return nil
		}
		if err := v.check(text); err != nil {
			return err
		}
	}
	v.to.SetString(text)
	return nil
}

func checkIP(text string) error {
	if netutils.ParseIPSloppy(text) == nil {
		return fmt.Errorf("%q is not an IP address", text)
	}
	return nil
}

func checkIPPort(text string) error {
	if checkIP(text) == nil {
		return nil
	}
	host, port, err := net.SplitHostPort(text)
	if err != nil || checkIP(host) != nil {
		return fmt.Errorf("%q is neither an IP address nor one with a port, like 0.0.0.0:10256 or [::]:10256", text)
	}
	if _, err := strconv.ParseUint(port, 10, 16); err != nil {
		return fmt.Errorf("%q: the port must be within 0 and 65535", text)
	}
	return nil
}

// Version is what --version asks for: "" or "false" nothing, "true" the version in one line, "raw" all
// that is known of it; "v1.2.3…" is the version to report instead of the real one.
type Version string

func (v *Version) String() string { return string(*v) }

// Type is what help calls the value.
func (v *Version) Type() string { return "version" }

// IsBoolFlag lets --version stand alone.
func (v *Version) IsBoolFlag() bool { return true }

// Set reads the value.
func (v *Version) Set(text string) error {
	if text == "raw" || strings.HasPrefix(text, "v") {
		*v = Version(text)
		return nil
	}
	value, err := strconv.ParseBool(text)
	if err != nil {
		return fmt.Errorf("must be true, false, raw or a version like v1.2.3")
	}
	*v = Version(strconv.FormatBool(value))
	return nil
}
