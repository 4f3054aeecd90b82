package nft

import "golang.org/x/sys/unix"

// From include/uapi/linux/netfilter/nf_tables.h; x/sys/unix lacks them.
const (
	flowtableName  = 2 // NFTA_FLOWTABLE_NAME
	flowtableHook  = 3 // NFTA_FLOWTABLE_HOOK
	flowtableFlags = 7 // NFTA_FLOWTABLE_FLAGS
	hookNumber     = 1 // NFTA_FLOWTABLE_HOOK_NUM
	hookPriority   = 2 // NFTA_FLOWTABLE_HOOK_PRIORITY
	hookDevices    = 3 // NFTA_FLOWTABLE_HOOK_DEVS
	deviceName     = 1 // NFTA_DEVICE_NAME

	ingress    = 0   // NF_NETDEV_INGRESS
	countFlows = 2   // NFT_FLOWTABLE_COUNTER: connection tracking counts packets as ever
	maxDevices = 255 // NFT_NETDEVICE_MAX of a message, less one
)

// NewFlowtable makes a flowtable for packets that devices receive. One that is there gets these devices, too.
func (t *Table) NewFlowtable(name string, devices []string) {
	for more := true; more; more = len(devices) > 0 {
		some := devices[:min(len(devices), maxDevices)]
		devices = devices[len(some):]
		t.Tx.Join()
		t.Object(unix.NFT_MSG_NEWFLOWTABLE, unix.NLM_F_CREATE, flowtableName, name)
		hook := t.Tx.Open(flowtableHook)
		t.Tx.Uint32(hookNumber, ingress)
		t.Tx.Uint32(hookPriority, 0)
		list := t.Tx.Open(hookDevices)
		for _, d := range some {
			t.Tx.Text(deviceName, d)
		}
		t.Tx.Close(list)
		t.Tx.Close(hook)
		t.Tx.Uint32(flowtableFlags, countFlows)
		t.Tx.End()
	}
}

// DeleteFlowtable deletes it. Its connections go on through the kernel's hooks.
func (t *Table) DeleteFlowtable(name string) {
	t.Object(unix.NFT_MSG_DELFLOWTABLE, 0, flowtableName, name)
	t.Tx.End()
}

// RenewFlowtable puts one that is empty, with these devices, in the place of the one to which a chain leads.
func (t *Table) RenewFlowtable(name string, devices []string, from Chain) error {
	t.Flush(from.Name)
	t.Tx.Join()
	t.DeleteFlowtable(name)
	t.NewFlowtable(name, devices)
	t.Chains[from.Name] = nil
	return t.SetChain(from)
}
