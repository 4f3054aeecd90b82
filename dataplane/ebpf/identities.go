package ebpf

import "github.com/cilium/ebpf"

// identities are the numbers by which the kernel calls programs, which they keep. It is asked once: it tells so much
// more of a program that this takes longer than all else in an Audit.
type identities struct {
	known map[*ebpf.Program]ebpf.ProgramID
}

func (i *identities) of(p *ebpf.Program) (ebpf.ProgramID, error) {
	if id, ok := i.known[p]; ok {
		return id, nil
	}
	info, err := p.Info()
	if err != nil {
		return 0, err
	}
	id, _ := info.ID() // since Linux 4.13
	if i.known == nil {
		i.known = map[*ebpf.Program]ebpf.ProgramID{}
	}
	i.known[p] = id
	return id, nil
}
