//! rtnetlink, one request at a time: what wg-quick does with `ip`, without iproute2. Used by `fv up`
//! and by the demo. A [`Netlink`] belongs to the network namespace of the thread that opened it.
#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "the kernel's attributes are many and grow; few are ours"
)]

mod link;
mod route;
#[cfg(test)]
mod tests;

use std::fmt;
use std::io;

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload,
    NlasIterator,
};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_sys::protocols::NETLINK_ROUTE;
use netlink_sys::{Socket, SocketAddr};
use nix::errno::Errno;

pub(crate) use route::{MAIN_TABLE, Route, Rule};

/// What the kernel puts in one datagram of a dump is at most 32 KiB; a single answer is far shorter.
const RECV_BYTES: usize = 64 * 1024;

/// How often a dump is started again when the kernel says that the list changed under it.
const DUMP_TRIES: usize = 5;

/// A request that failed: what was attempted, and why it did not work.
#[derive(Debug)]
pub(crate) struct Error {
    what: String,
    hint: Option<String>,
    source: io::Error,
}

/// Result of a netlink request.
pub(crate) type Result<T> = std::result::Result<T, Error>;

impl Error {
    fn new(what: impl fmt::Display, source: io::Error) -> Self {
        Self { what: what.to_string(), hint: None, source }
    }

    /// The kernel's error number.
    pub(crate) fn errno(&self) -> Option<Errno> {
        self.source.raw_os_error().map(Errno::from_raw)
    }

    /// The thing exists already.
    pub(crate) fn exists(&self) -> bool {
        self.errno() == Some(Errno::EEXIST)
    }

    /// The thing is not there (any more).
    pub(crate) fn missing(&self) -> bool {
        matches!(
            self.errno(),
            Some(Errno::ENOENT | Errno::ESRCH | Errno::ENODEV | Errno::ENXIO | Errno::EADDRNOTAVAIL)
        )
    }

    /// There is no route to the address.
    pub(crate) fn no_way(&self) -> bool {
        matches!(self.errno(), Some(Errno::ENETUNREACH | Errno::EHOSTUNREACH))
    }

    /// The kernel has no such protocol family or feature: IPv6 is off, or policy routing is not built in.
    pub(crate) fn unsupported(&self) -> bool {
        matches!(
            self.errno(),
            Some(Errno::EOPNOTSUPP | Errno::EAFNOSUPPORT | Errno::EPROTONOSUPPORT | Errno::ENOPROTOOPT)
        )
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot {}: ", self.what)?;
        match (self.errno(), &self.hint) {
            (Some(Errno::EPERM | Errno::EACCES), None) => {
                f.write_str("not permitted; this needs root or CAP_NET_ADMIN")
            }
            (Some(errno), None) => f.write_str(errno.desc()),
            (Some(errno), Some(hint)) => write!(f, "{} ({hint})", errno.desc()),
            (None, _) => write!(f, "{}", self.source),
        }
    }
}

impl std::error::Error for Error {}

/// A socket to the kernel's routing tables.
pub(crate) struct Netlink {
    socket: Socket,
    sequence: u32,
    buffer: Vec<u8>,
}

impl Netlink {
    /// Opens a socket in the calling thread's network namespace.
    pub(crate) fn open() -> Result<Self> {
        Self::open_socket().map_err(|e| Error::new("talk to the kernel's network configuration (netlink)", e))
    }

    fn open_socket() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.bind(&SocketAddr::new(0, 0))?;
        socket.connect(&SocketAddr::new(0, 0))?;
        // Both only make answers better; kernels before 4.12 and 4.20 do without.
        let _ = socket.set_cap_ack(true).and_then(|()| socket.set_ext_ack(true));
        let _ = socket.set_netlink_get_strict_chk(true);
        Ok(Self { socket, sequence: 0, buffer: vec![0; RECV_BYTES] })
    }

    /// A change: sent, and acknowledged by the kernel.
    fn change(&mut self, what: impl fmt::Display, message: RouteNetlinkMessage, flags: u16) -> Result<()> {
        self.exchange(&what, message, NLM_F_ACK | flags).map(drop)
    }

    /// A question with at most one answer.
    fn ask(
        &mut self,
        what: impl fmt::Display,
        message: RouteNetlinkMessage,
    ) -> Result<Vec<RouteNetlinkMessage>> {
        self.exchange(&what, message, NLM_F_ACK).map(|(answers, _)| answers)
    }

    /// Everything of one kind. What this library cannot read is left out.
    fn list(
        &mut self,
        what: impl fmt::Display,
        message: RouteNetlinkMessage,
    ) -> Result<Vec<RouteNetlinkMessage>> {
        for _ in 0..DUMP_TRIES {
            let (answers, consistent) = self.exchange(&what, message.clone(), NLM_F_DUMP)?;
            if consistent {
                return Ok(answers);
            }
        }
        Err(Error::new(what, io::Error::other("it keeps changing while it is read; try again")))
    }

    /// Sends one request and reads until it is acknowledged or the dump is done. The flag says that the
    /// answers belong together (no change while they were listed).
    fn exchange(
        &mut self,
        what: &impl fmt::Display,
        message: RouteNetlinkMessage,
        flags: u16,
    ) -> Result<(Vec<RouteNetlinkMessage>, bool)> {
        self.sequence = self.sequence.wrapping_add(1);
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | flags;
        header.sequence_number = self.sequence;
        let mut request = NetlinkMessage::new(header, NetlinkPayload::from(message));
        request.finalize();
        let mut bytes = vec![0; request.buffer_len()];
        request.serialize(&mut bytes);
        self.socket.send(&bytes, 0).map_err(|e| Error::new(what, e))?;

        let mut answers = Vec::new();
        let mut consistent = true;
        loop {
            let got = match self.socket.recv(&mut self.buffer.as_mut_slice(), 0) {
                Ok(got) => got,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(Error::new(what, e)),
            };
            for bytes in messages(&self.buffer[..got]) {
                let Ok(answer) = NetlinkMessage::<RouteNetlinkMessage>::deserialize(bytes) else { continue };
                if answer.header.sequence_number != self.sequence {
                    continue;
                }
                consistent &= answer.header.flags & NLM_F_DUMP_INTR == 0;
                match answer.payload {
                    NetlinkPayload::InnerMessage(inner) => answers.push(inner),
                    NetlinkPayload::Done(_) => return Ok((answers, consistent)),
                    NetlinkPayload::Error(error) if error.code.is_none() => return Ok((answers, consistent)),
                    NetlinkPayload::Error(error) => {
                        return Err(Error {
                            what: what.to_string(),
                            hint: kernel_hint(&error.header),
                            source: error.to_io(),
                        });
                    }
                    _ => {}
                }
            }
        }
    }
}

/// Cuts a datagram into messages; each begins with its own length and is padded to four bytes.
fn messages(mut bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let length = u32::from_ne_bytes(*bytes.first_chunk::<4>()?) as usize;
        // Shorter than its own header: nothing after it can be trusted.
        let message = bytes.get(..length).filter(|m| m.len() >= 16)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(message)
    })
}

/// The kernel's own sentence about an error (NLMSGERR_ATTR_MSG), which follows the echoed request header.
fn kernel_hint(payload: &[u8]) -> Option<String> {
    const MSG: u16 = 1;
    let attributes = payload.get(16..)?;
    let hint = NlasIterator::new(attributes).flatten().find(|nla| nla.kind() == MSG)?;
    Some(String::from_utf8_lossy(hint.value()).trim_end_matches(['\0', '.']).to_owned())
}
