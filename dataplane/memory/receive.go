package memory

// Receive has the active table take the first packet of a connection. The table decides when the returned function is
// called: a process may have read the packet before it is told to drain.
func (k *Kernel) Receive(p Packet) (decide func() Answer) {
	a := k.Send(p)
	k.mu.Lock()
	defer k.mu.Unlock()
	t := k.tables[a.Plane]
	if t == nil || t.nature != Relayed {
		return func() Answer { return a }
	}
	delete(k.open, p) // the process does not know of it yet
	return func() Answer {
		k.mu.Lock()
		defer k.mu.Unlock()
		if t.process == nil || t.process != a.holder {
			return Answer{} // the process has died
		}
		k.open[p] = a
		return a
	}
}
