package deploy

import (
	"bytes"
	"encoding/binary"
	"os"
	"path/filepath"
	"slices"
	"testing"

	filter "github.com/elastic/go-seccomp-bpf"
	"github.com/elastic/go-seccomp-bpf/arch"
	"github.com/moby/profiles/seccomp"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// runtimeDefault writes the profile RuntimeDefault, as container runtimes make it for some capabilities, in the form that
// bubblewrap takes.
func runtimeDefault(t *testing.T, capabilities []string) (file string) {
	t.Helper()
	spec := &specs.Spec{Process: &specs.Process{Capabilities: &specs.LinuxCapabilities{}}}
	for _, name := range capabilities {
		spec.Process.Capabilities.Bounding = append(spec.Process.Capabilities.Bounding, "CAP_"+name)
	}
	profile, err := seccomp.GetDefaultProfile(spec)
	if err != nil {
		t.Fatal(err)
	}
	policy := policy(t, profile)
	instructions, err := policy.Assemble()
	if err != nil {
		t.Fatal(err)
	}
	raw, err := bpf.Assemble(instructions)
	if err != nil {
		t.Fatal(err)
	}
	var program bytes.Buffer
	for _, i := range raw { // struct sock_filter
		if err := binary.Write(&program, binary.NativeEndian, i); err != nil {
			t.Fatal(err)
		}
	}
	file = filepath.Join(t.TempDir(), "seccomp")
	if err := os.WriteFile(file, program.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
	return file
}

// policy is a profile for this architecture, without calls that it does not have. Rules that depend on arguments are in
// one group and come last: the filter does not load the call's number again after it.
func policy(t *testing.T, profile *specs.LinuxSeccomp) filter.Policy {
	t.Helper()
	machine, err := arch.GetInfo("")
	if err != nil {
		t.Fatal(err)
	}
	p := filter.Policy{DefaultAction: action(t, profile.DefaultAction, profile.DefaultErrnoRet)}
	last := filter.SyscallGroup{Action: filter.ActionAllow}
	for _, call := range profile.Syscalls {
		names := slices.DeleteFunc(slices.Clone(call.Names), func(name string) bool {
			_, known := machine.SyscallNames[name]
			return !known
		})
		group := filter.SyscallGroup{Names: names, Action: action(t, call.Action, call.ErrnoRet)}
		if len(call.Args) == 0 {
			p.Syscalls = append(p.Syscalls, group)
			continue
		}
		if group.Action != last.Action {
			t.Fatalf("the profile has a rule of a kind that is new: %+v", call)
		}
		for _, name := range names {
			last.NamesWithCondtions = append(last.NamesWithCondtions,
				filter.NameWithConditions{Name: name, Conditions: conditions(t, call.Args)})
		}
	}
	p.Syscalls = append(p.Syscalls, last)
	return p
}

// action without a number is EPERM.
func action(t *testing.T, a specs.LinuxSeccompAction, number *uint) filter.Action {
	t.Helper()
	switch {
	case a == specs.ActAllow:
		return filter.ActionAllow
	case a == specs.ActErrno && (number == nil || *number == uint(unix.EPERM)):
		return filter.ActionErrno
	case a == specs.ActErrno:
		return filter.ActionErrno | filter.Action(*number)
	}
	t.Fatalf("the profile has an action that is new: %s", a)
	return 0
}

func conditions(t *testing.T, args []specs.LinuxSeccompArg) (all filter.ArgumentConditions) {
	t.Helper()
	operations := map[specs.LinuxSeccompOperator]filter.Operation{
		specs.OpEqualTo: filter.Equal, specs.OpNotEqual: filter.NotEqual, specs.OpLessThan: filter.LessThan,
		specs.OpGreaterThan: filter.GreaterThan, specs.OpMaskedEqual: filter.BitsNotSet,
	}
	for _, a := range args {
		operation, known := operations[a.Op]
		if !known || a.Op == specs.OpMaskedEqual && a.ValueTwo != 0 {
			t.Fatalf("the profile compares in a way that is new: %+v", a)
		}
		all = append(all, filter.Condition{Argument: uint32(a.Index), Operation: operation, Value: a.Value})
	}
	return all
}
