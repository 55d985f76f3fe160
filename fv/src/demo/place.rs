//! Where the demo happens: two network namespaces with a cable between them. As an ordinary user they are made
//! inside of a user namespace, where this process is root and nowhere else.

use std::fs::{self, OpenOptions};
use std::io;
use std::net::IpAddr;
use std::os::fd::AsFd;

use ipnet::IpNet;
use nix::errno::Errno;
use nix::sched::{CloneFlags, unshare};
use nix::unistd::{getegid, geteuid};

use crate::namespace::Namespace;
use crate::netlink::Netlink;

/// Two hosts of our own, called left and right, joined by a cable.
#[derive(Debug)]
pub(crate) struct Place {
    /// The hosts.
    pub(crate) hosts: [Namespace; 2],
    /// What had to be done to get here, for the report.
    pub(crate) how: &'static str,
}

/// The cable's ends and their addresses (RFC 5737 and RFC 3849: for documentation only).
const CABLE: [(&str, &str); 2] = [("left", "192.0.2.1/24"), ("right", "192.0.2.2/24")];

/// Addresses of the cable's ends, left and right.
pub(crate) fn outer() -> [IpAddr; 2] {
    CABLE.map(|(_, address)| net(address).addr())
}

fn net(text: &str) -> IpNet {
    text.parse().unwrap_or_default()
}

impl Place {
    /// Makes the hosts. Has to be called before this process has a second thread: only then can an ordinary user
    /// become root of a user namespace.
    ///
    /// # Errors
    /// Why it cannot be had here and how to get it, for the reader of the report.
    pub(crate) fn make() -> Result<Self, String> {
        check_node()?;
        let mut how = "two network namespaces, as root";
        if !geteuid().is_root() {
            become_root().map_err(|e| no_user_namespace(&e))?;
            how = "two network namespaces inside of a user namespace, no privilege needed";
        }
        let left = match Namespace::new() {
            Err(e) if geteuid().is_root() && how.ends_with("root") && denied(&e) => {
                // Root of a container that may not do it: a user namespace of one's own may still be allowed.
                become_root().map_err(|_| no_namespace(&e))?;
                how = "two network namespaces inside of a user namespace";
                Namespace::new()
            }
            other => other,
        }
        .map_err(|e| no_namespace(&e))?;
        let right = Namespace::new().map_err(|e| no_namespace(&e))?;
        let hosts = [left, right];
        join(&hosts).map_err(|e| format!("the two network namespaces cannot be joined: {e}"))?;
        check_tun(&hosts[0])?;
        Ok(Self { hosts, how })
    }
}

/// Lays the cable and gives its ends their addresses.
fn join(hosts: &[Namespace; 2]) -> Result<(), String> {
    let work = |host: &Namespace, (name, address): (&str, &str), far: Option<(&str, &Namespace)>| {
        host.run(|| {
            let mut netlink = Netlink::open()?;
            if let Some((peer, namespace)) = far {
                netlink.add_veth(name, peer, namespace.as_fd())?;
            }
            if let Some(link) = netlink.link(name)? {
                netlink.add_address(link.index, net(address))?;
                netlink.set_up(link.index, true)?;
            }
            Ok::<_, crate::netlink::Error>(())
        })
        .map_err(|e| e.to_string())?
        .map_err(|e| e.to_string())
    };
    let [left, right] = hosts;
    let [near, far] = CABLE;
    work(left, near, Some((far.0, right)))?;
    work(right, far, None)
}

/// Becomes root of a new user namespace in which the own user is root and nobody else exists.
fn become_root() -> io::Result<()> {
    let (uid, gid) = (geteuid(), getegid());
    let mut tries = 0;
    loop {
        match unshare(CloneFlags::CLONE_NEWUSER) {
            Ok(()) => break,
            // A thread that ended a moment ago can still be counted.
            Err(Errno::EINVAL) if tries < 50 => {
                tries += 1;
                std::thread::sleep(std::time::Duration::from_millis(2));
            }
            Err(e) => return Err(e.into()),
        }
    }
    // Without the right to change groups, a user may map one's own group.
    match fs::write("/proc/self/setgroups", "deny") {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    fs::write("/proc/self/uid_map", format!("0 {uid} 1"))?;
    fs::write("/proc/self/gid_map", format!("0 {gid} 1"))
}

fn denied(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::PermissionDenied
}

fn no_user_namespace(error: &io::Error) -> String {
    let file = |name: &str| fs::read_to_string(format!("/proc/sys/{name}")).unwrap_or_default();
    let cure = if file("user/max_user_namespaces").trim() == "0" {
        "this machine allows none: set the sysctl user.max_user_namespaces to 1000, or run this as root"
    } else if file("kernel/unprivileged_userns_clone").trim() == "0" {
        "only root may make one here: set the sysctl kernel.unprivileged_userns_clone to 1, or run this as root"
    } else if file("kernel/apparmor_restrict_unprivileged_userns").trim() == "1" {
        "AppArmor forbids it: set the sysctl kernel.apparmor_restrict_unprivileged_userns to 0, or run this as root"
    } else {
        "run this as root; in a container, start it with --cap-add SYS_ADMIN --cap-add NET_ADMIN --device \
         /dev/net/tun"
    };
    format!("a user namespace is not to be had ({error}); {cure}")
}

fn no_namespace(error: &io::Error) -> String {
    let restricted = fs::read_to_string("/proc/sys/kernel/apparmor_restrict_unprivileged_userns");
    let cure = match error.raw_os_error().map(Errno::from_raw) {
        Some(Errno::ENOSPC) => "their number is used up: raise the sysctl user.max_net_namespaces",
        Some(Errno::EINVAL) => "this kernel has none",
        _ if restricted.is_ok_and(|text| text.trim() == "1") => {
            "AppArmor forbids it: set the sysctl kernel.apparmor_restrict_unprivileged_userns to 0, or run this \
             as root"
        }
        _ => {
            "run this as root; in a container, start it with --cap-add SYS_ADMIN --cap-add NET_ADMIN --device \
             /dev/net/tun"
        }
    };
    format!("a network namespace is not to be had ({error}); {cure}")
}

/// The library makes a missing node where it may; here nothing outside of the namespaces is touched.
fn check_node() -> Result<(), String> {
    let Err(e) = OpenOptions::new().read(true).write(true).open("/dev/net/tun") else { return Ok(()) };
    if e.kind() == io::ErrorKind::NotFound {
        return Err(
            "there is no /dev/net/tun; load the kernel's tun module (modprobe tun), or start the container \
                    with --device /dev/net/tun"
                .to_owned(),
        );
    }
    if e.kind() == io::ErrorKind::PermissionDenied {
        return Err(
            "this user may not open /dev/net/tun; run this as root, or allow it (chmod 666 /dev/net/tun)"
                .to_owned(),
        );
    }
    Err(format!("/dev/net/tun cannot be opened ({e}); load the kernel's tun module (modprobe tun)"))
}

/// Makes a TUN device as an end would, and lets it go again.
fn check_tun(host: &Namespace) -> Result<(), String> {
    host.run(|| forestvpn_quantum::io::Tun::open("fvprobe").map(drop))
        .map_err(|e| e.to_string())?
        .map_err(|e| format!("a TUN device is not to be had: {e}"))
}
