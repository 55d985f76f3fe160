//! The link monitor: tells the worker when its interface goes up or down, changes its MTU, or is deleted.
//! Started by `run` and by `up`, once per device.

use std::io;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use forestvpn_quantum::io::Link;

/// How often it is asked without an event: in another network namespace there may be none.
const LOOK: Duration = Duration::from_secs(1);

/// Who wants to know.
pub(crate) trait Follower: Send + 'static {
    /// The interface is up or down now, with this MTU in bytes.
    fn changed(&mut self, up: bool, mtu: u16) -> Next;

    /// The interface was deleted. Nothing comes after it.
    fn gone(&mut self);
}

/// What the monitor does after a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Go on, until something changes.
    Watch,
    /// Say the same again at the next look: it could not be followed.
    Again,
    /// End.
    End,
}

/// Starts to follow `link`. The first report comes at once, the others when something changed. Deletion is seen
/// by the TUN descriptor itself: the kernel also says "deleted" of an interface that moves to another namespace.
///
/// # Errors
/// When the system gives no thread.
pub(crate) fn follow(mut link: Link, mut follower: impl Follower) -> io::Result<JoinHandle<()>> {
    thread::Builder::new().name("link".to_owned()).spawn(move || {
        let mut last = None;
        let mut visible = true;
        loop {
            match link.status() {
                Ok(None) => return follower.gone(),
                Ok(Some(now)) => {
                    visible = true;
                    let mtu = u16::try_from(now.mtu).unwrap_or(u16::MAX);
                    if last != Some((now.up, mtu)) {
                        log::debug!("interface is {}, MTU {mtu}", if now.up { "up" } else { "down" });
                        last = match follower.changed(now.up, mtu) {
                            Next::Watch => Some((now.up, mtu)),
                            Next::Again => None,
                            Next::End => return,
                        };
                    }
                }
                // What was known last is the best guess.
                Err(error) if visible => {
                    visible = false;
                    log::warn!("cannot see the interface any more ({error}); it counts as unchanged");
                }
                Err(_) => {}
            }
            if link.wait(LOOK).is_err() {
                thread::sleep(LOOK);
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::sync::mpsc::{Receiver, Sender, channel};

    use forestvpn_quantum::io::Tun;

    use super::*;
    use crate::namespace::{Namespace, alone};
    use crate::netlink::Netlink;

    #[derive(Debug, PartialEq, Eq)]
    enum Report {
        Changed(bool, u16),
        Gone,
    }

    struct Tell(Sender<Report>);

    impl Follower for Tell {
        fn changed(&mut self, up: bool, mtu: u16) -> Next {
            if self.0.send(Report::Changed(up, mtu)).is_ok() { Next::Watch } else { Next::End }
        }
        fn gone(&mut self) {
            let _ = self.0.send(Report::Gone);
        }
    }

    fn start() -> (Tun, Receiver<Report>, JoinHandle<()>, Netlink, u32) {
        let tun = Tun::open("fvlink0").unwrap();
        let (sender, reports) = channel();
        let thread = follow(Link::new(&tun).unwrap(), Tell(sender)).unwrap();
        let mut netlink = Netlink::open().unwrap();
        let index = netlink.link("fvlink0").unwrap().unwrap().index;
        (tun, reports, thread, netlink, index)
    }

    fn next(reports: &Receiver<Report>) -> Report {
        reports.recv_timeout(Duration::from_secs(5)).expect("a report")
    }

    #[test]
    fn up_down_mtu_and_deletion_are_reported_each_once() {
        alone(|| {
            let (tun, reports, thread, mut netlink, index) = start();
            assert_eq!(next(&reports), Report::Changed(false, 1500));
            netlink.set_up(index, true).unwrap();
            assert_eq!(next(&reports), Report::Changed(true, 1500));
            netlink.set_mtu(index, 1300).unwrap();
            assert_eq!(next(&reports), Report::Changed(true, 1300));
            netlink.set_up(index, false).unwrap();
            assert_eq!(next(&reports), Report::Changed(false, 1300));
            netlink.delete_link(index).unwrap();
            assert_eq!(next(&reports), Report::Gone);
            thread.join().unwrap();
            drop(tun);
        });
    }

    #[test]
    fn an_interface_that_moved_to_another_namespace_is_followed_there_and_is_not_gone() {
        alone(|| {
            let (tun, reports, thread, mut netlink, index) = start();
            assert_eq!(next(&reports), Report::Changed(false, 1500));
            let other = Namespace::new().unwrap();
            netlink.move_link(index, other.as_fd()).unwrap();
            let there = |change: fn(&mut Netlink, u32)| {
                other
                    .run(|| {
                        let mut netlink = Netlink::open().unwrap();
                        let index = netlink.link("fvlink0").unwrap().unwrap().index;
                        change(&mut netlink, index);
                    })
                    .unwrap();
            };
            there(|netlink, index| netlink.set_up(index, true).unwrap());
            assert_eq!(next(&reports), Report::Changed(true, 1500));
            there(|netlink, index| netlink.set_mtu(index, 1280).unwrap());
            assert_eq!(next(&reports), Report::Changed(true, 1280));
            there(|netlink, index| netlink.delete_link(index).unwrap());
            assert_eq!(next(&reports), Report::Gone);
            thread.join().unwrap();
            drop(tun);
        });
    }
}
