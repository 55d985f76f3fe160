//! How other threads speak to a running worker: one command at a time through its inbox, answered in turn.
//!
//! The worker looks into the inbox once per turn, so an answer takes as long as a turn, also under full load.

use core::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender, SyncSender};

use mio::Waker;

use crate::config::{DeviceSnapshot, DeviceUpdate};
use crate::device::ConfigError;
use crate::io::{TunCaps, UdpStatus};

/// The worker has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gone;

impl fmt::Display for Gone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the tunnel has ended")
    }
}

impl std::error::Error for Gone {}

/// Why a change was refused; nothing of it was applied.
#[derive(Debug)]
#[non_exhaustive]
pub enum ConfigureError {
    /// No socket could be opened on the port.
    Bind {
        /// The port that was asked for; 0 = any.
        port: u16,
        /// What the system said.
        source: io::Error,
    },
    /// The sockets may not be marked.
    Mark {
        /// The mark that was asked for.
        fwmark: u32,
        /// What the system said.
        source: io::Error,
    },
    /// The device would have more peers than it can name.
    TooManyPeers,
    /// The worker has ended.
    Gone,
}

impl fmt::Display for ConfigureError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bind { port, source } if source.kind() == io::ErrorKind::AddrInUse => {
                write!(f, "UDP port {port} is in use by another program; choose another, or 0 for any")
            }
            Self::Bind { port, source } if source.kind() == io::ErrorKind::PermissionDenied => {
                write!(f, "UDP port {port} may not be used; choose one from 1024 on, or run as root")
            }
            Self::Bind { port, source } => write!(f, "cannot listen on UDP port {port}: {source}"),
            Self::Mark { fwmark, source } if source.raw_os_error() == Some(libc::EPERM) => {
                write!(
                    f,
                    "the firewall mark {fwmark:#x} may not be set: CAP_NET_ADMIN is missing; run as root"
                )
            }
            Self::Mark { fwmark, source } => write!(f, "cannot set the firewall mark {fwmark:#x}: {source}"),
            Self::TooManyPeers => ConfigError::TooManyPeers.fmt(f),
            Self::Gone => Gone.fmt(f),
        }
    }
}

impl std::error::Error for ConfigureError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        if let Self::Bind { source, .. } | Self::Mark { source, .. } = self { Some(source) } else { None }
    }
}

impl From<Gone> for ConfigureError {
    fn from(Gone: Gone) -> Self {
        Self::Gone
    }
}

/// Everything a worker counted, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters(pub(crate) Vec<(&'static str, u64)>);

impl Counters {
    /// Names and values, in a fixed order: first packets that were not let through, by
    /// [`Discard`](crate::Discard), then `udp_…` and `tun_…`.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.0.iter().copied()
    }

    /// One of them.
    pub fn get(&self, name: &str) -> Option<u64> {
        self.iter().find(|(n, _)| *n == name).map(|(_, value)| value)
    }
}

/// What a worker has in use at this moment, for whoever looks after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    /// The link is up: packets flow.
    pub up: bool,
    /// Threads that carry packets.
    pub threads: usize,
    /// What the TUN device was granted.
    pub tun: TunCaps,
    /// Received packets of one flow are joined for the TUN device.
    pub merging: bool,
    /// UDP datagrams of one flow are, too.
    pub merging_udp: bool,
    /// The sockets, while they are open.
    pub udp: Option<UdpStatus>,
    /// Which code encrypts data packets, in words.
    pub cipher: &'static str,
}

pub(crate) type Reply<T> = SyncSender<T>;

pub(crate) enum Command {
    Configure(Box<DeviceUpdate>, Reply<Result<(), ConfigureError>>),
    Snapshot(Reply<DeviceSnapshot>),
    Counters(Reply<Counters>),
    Status(Reply<Status>),
    SetLink { up: bool, mtu: u16, reply: Reply<Result<(), ConfigureError>> },
    Stop,
}

/// Speaks to a [`Worker`](crate::Worker) from any thread.
#[derive(Clone)]
pub struct Handle {
    commands: Sender<Command>,
    posted: Arc<AtomicBool>,
    waker: Arc<Waker>,
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle").finish_non_exhaustive()
    }
}

impl Handle {
    /// Applies a change and waits until it is applied: from then on every packet is treated by it.
    ///
    /// # Errors
    /// [`ConfigureError`]; nothing was changed then, port and mark included.
    pub fn configure(&self, update: DeviceUpdate) -> Result<(), ConfigureError> {
        self.ask(|reply| Command::Configure(Box::new(update), reply))?
    }

    /// What `wg show` wants to know.
    ///
    /// # Errors
    /// [`Gone`].
    pub fn snapshot(&self) -> Result<DeviceSnapshot, Gone> {
        self.ask(Command::Snapshot)
    }

    /// What was counted so far.
    ///
    /// # Errors
    /// [`Gone`].
    pub fn counters(&self) -> Result<Counters, Gone> {
        self.ask(Command::Counters)
    }

    /// What is in use, and what was given up.
    ///
    /// # Errors
    /// [`Gone`].
    pub fn status(&self) -> Result<Status, Gone> {
        self.ask(Command::Status)
    }

    /// Follows the interface: up opens the sockets, down closes them and wipes all keys (C-TMR-12). `mtu` is
    /// that of the interface in bytes; a mere change of it is told here too.
    ///
    /// # Errors
    /// Sockets could not be opened: the tunnel stays down, while its interface is up; to be called again.
    pub fn set_link(&self, up: bool, mtu: u16) -> Result<(), ConfigureError> {
        self.ask(|reply| Command::SetLink { up, mtu, reply })?
    }

    /// Has the worker end soon; does not wait for it.
    pub fn stop(&self) {
        let _ = self.post(Command::Stop);
    }

    fn ask<T>(&self, command: impl FnOnce(Reply<T>) -> Command) -> Result<T, Gone> {
        let (reply, answer) = mpsc::sync_channel(1);
        self.post(command(reply))?;
        answer.recv().map_err(|_| Gone)
    }

    fn post(&self, command: Command) -> Result<(), Gone> {
        self.commands.send(command).map_err(|_| Gone)?;
        self.posted.store(true, Ordering::Release);
        // Cannot fail but for a full counter, and then the worker is awake.
        let _ = self.waker.wake();
        Ok(())
    }
}

/// The worker's end of it.
#[derive(Debug)]
pub(crate) struct Inbox {
    commands: Receiver<Command>,
    posted: Arc<AtomicBool>,
}

impl fmt::Debug for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Command")
    }
}

impl Inbox {
    /// An inbox and the way into it; `waker` is that of the thread that reads it.
    pub(crate) fn new(waker: Arc<Waker>) -> (Self, Handle) {
        let (commands, received) = mpsc::channel();
        let posted = Arc::new(AtomicBool::new(false));
        (Self { commands: received, posted: Arc::clone(&posted) }, Handle { commands, posted, waker })
    }

    /// Whether something may wait; one atomic read when nothing does.
    pub(crate) fn is_posted(&self) -> bool {
        self.posted.load(Ordering::Relaxed) && self.posted.swap(false, Ordering::Acquire)
    }

    pub(crate) fn next(&self) -> Option<Command> {
        self.commands.try_recv().ok()
    }
}
