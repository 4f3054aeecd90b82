#!/bin/sh
# After an installation or upgrade. The argument is "configure" and the version before (deb), or how many versions there
# are now (rpm). A first installation starts nothing: the agent would take the place of a kube-proxy that runs.
set -e
[ -d /run/systemd/system ] || exit 0
systemctl daemon-reload
if [ "$1" -gt 1 ] 2>/dev/null || [ -n "$2" ]; then
  systemctl try-restart fairlead.service
else
  echo "Fairlead is installed. Put manifests into /etc/fairlead/manifests, then: systemctl enable --now fairlead"
fi
