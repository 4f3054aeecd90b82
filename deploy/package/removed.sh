#!/bin/sh
# Before a removal, and not before an upgrade: "remove" (deb), or 0 versions that stay (rpm). What the agent has made in
# the kernel goes with it.
set -e
case $1 in remove | 0) ;; *) exit 0 ;; esac
if [ -d /run/systemd/system ]; then
  systemctl --quiet disable --now fairlead.service fairlead-health.service
fi
/usr/bin/fairlead clean --own ||
  echo "Fairlead's rules may stay. Stop every agent of this node before you remove the package." >&2
rm -rf /run/fairlead
