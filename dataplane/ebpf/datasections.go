package ebpf

import (
	"maps"
	"strings"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// Tables of one element that programs find without a look-up, as the verifier writes its address into them. To the
// compiler they are variables, each in a section for itself, which is what the table is called by.
const (
	inForceTable  = "in_force"
	activityTable = "activity"

	dataSection = ".data."
)

// withWords has them be tables as others are, with names that pins may have: without a dot.
func withWords(spec *ebpf.CollectionSpec, err error) (*ebpf.CollectionSpec, error) {
	if err != nil {
		return nil, err
	}
	for _, name := range []string{inForceTable, activityTable} {
		m := spec.Maps[dataSection+name]
		if m == nil {
			continue
		}
		m.Name = name
		m.Flags |= unix.BPF_F_MMAPABLE
		spec.Maps[name] = m
		delete(spec.Maps, dataSection+name)
		maps.DeleteFunc(spec.Variables, func(_ string, v *ebpf.VariableSpec) bool {
			return v.SectionName == dataSection+name
		})
	}
	for _, p := range spec.Programs {
		for i, instruction := range p.Instructions {
			if name, ok := strings.CutPrefix(instruction.Reference(), dataSection); ok {
				p.Instructions[i] = instruction.WithReference(name)
			}
		}
	}
	return spec, nil
}
